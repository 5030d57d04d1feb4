// Attention over packed rows: checks of what was handed over, parts of the work, threads, and the merge of parts.
#include <algorithm>
#include <atomic>
#include <new>

#include "attend_item.h"
#include "checks.h"
#if defined(KVTUNER_TILES)
#include "attend_tiles.h"
typedef TileAttender AttenderOfParts;
#else
typedef Attender AttenderOfParts;
#endif

namespace {

constexpr int64_t SPLIT = 2048;     // tokens of a part, whatever the batch and the threads, which so change no result
constexpr int64_t FEW_QUERIES = 8;  // a request of more is not split by tokens: its queries are parts enough
constexpr int MOST_ROWS = 64;       // queries of one KV head in a part

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a request is cut: queries of a part, parts of its tokens, and heads of a part.
struct Cut {
    int64_t queries, splits;
    int32_t heads;
};

Cut cut_of(const AttendJob &job, int64_t request, int64_t all_queries) {
    const int64_t tokens = job.tokens[request + 1] - job.tokens[request], queries = job.queries[request + 1] - job.queries[request];
    const int64_t most = MOST_ROWS / job.gqa;
    Cut cut = {most < 1 ? 1 : most < queries ? most : queries, 1, job.keys.num_heads};
    if (queries <= FEW_QUERIES) cut.splits = tokens > SPLIT ? divided_up(tokens, SPLIT) : 1;
    // All heads of a block in turn read rows as they lie; but each has its own part where there are few, or much to keep.
    if (cut.queries * job.gqa > 16 || (job.threads > 1 && all_queries * cut.splits < 4 * job.threads)) cut.heads = 1;
    return cut;
}

struct Work {
    const AttendJob &job;
    const SidePlan &keys, &values;
    Item *items;
    int64_t num_items;
    int heads, rows;
    float *partials;
    uint8_t *scratch;
    int64_t scratch_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<int> threads{0};
};

void run(void *pointer) {
    Work &work = *(Work *)pointer;
    const int thread = work.threads.fetch_add(1);
    if (thread >= work.job.threads) return;
    AttenderOfParts attender(work.job, work.keys, work.values, work.heads, work.rows, work.scratch + thread * work.scratch_bytes);
    for (int64_t i; (i = work.next.fetch_add(1)) < work.num_items;) attender.attend(work.items[i], work.partials);
}

// Counts the parts, or writes them down, and returns the numbers that their sums take.
int64_t make_items(const AttendJob &job, Item *items, int64_t *count, int *heads, int *rows) {
    int64_t partials = 0, n = 0;
    const int64_t row = (int64_t)job.keys.num_heads * job.gqa * (job.values.head_dim + 2);
    for (int64_t r = 0; r < job.num_requests; r++) {
        const int64_t tokens = job.tokens[r + 1] - job.tokens[r], queries = job.queries[r + 1] - job.queries[r];
        if (queries == 0) continue;
        const Cut cut = cut_of(job, r, job.queries[job.num_requests]);
        if (cut.heads > *heads) *heads = cut.heads;
        if (cut.queries * job.gqa > *rows) *rows = (int)(cut.queries * job.gqa);
        for (int64_t query = 0; query < queries; query += cut.queries)
            for (int64_t split = 0; split < cut.splits; split++)
                for (int32_t head = 0; head < job.keys.num_heads; head += cut.heads, n++) {
                    if (!items) continue;
                    const int64_t many = queries - query < cut.queries ? queries - query : cut.queries;
                    const int64_t at = job.queries[r] + query;
                    int64_t first = cut.splits > 1 ? split * SPLIT : 0;
                    int64_t last = cut.splits > 1 && first + SPLIT < tokens ? first + SPLIT : tokens;
                    // Tokens before and behind those that any of these queries reads are left out.
                    if (job.first) first = std::max(first, *std::min_element(job.first + at, job.first + at + many));
                    if (job.last) last = std::min(last, *std::max_element(job.last + at, job.last + at + many));
                    items[n] = {r, at, many, first, last,
                                cut.splits > 1 ? partials + split * queries * row : -1, head, cut.heads};
                }
        if (cut.splits > 1) partials += cut.splits * queries * row;
    }
    *count = n;
    return partials;
}

// Merges the parts of a request that was split, each relative to its own largest score.
void merge(const AttendJob &job, int64_t request, const float *partials, int64_t splits) {
    const int64_t all_heads = (int64_t)job.keys.num_heads * job.gqa, queries = job.queries[request + 1] - job.queries[request];
    const int D = job.values.head_dim;
    for (int64_t i = 0; i < queries * all_heads; i++) {
        const int64_t at = job.queries[request] * all_heads + i, step = queries * all_heads * (D + 2);
        const float *part = partials + i * (D + 2);
        float *out = job.out + at * D, top = LOWEST, total = 0;
        for (int64_t s = 0; s < splits; s++) top = fmaxf(top, part[s * step]);
        for (int c = 0; c < D; c++) out[c] = 0;
        for (int64_t s = 0; s < splits; s++) {
            const float share = exp2f(part[s * step] - top);
            total += share * part[s * step + 1];
            for (int c = 0; c < D; c++) out[c] += share * part[s * step + 2 + c];
        }
        for (int c = 0; c < D; c++) out[c] = total == 0 ? 0 : out[c] / total;
        job.lse[at] = total == 0 ? -INFINITY : top * LN2 + logf(total);
    }
}

}  // namespace

extern "C" VISIBLE int kvtuner_attend(const AttendJob *given) {
    AttendJob job = *given;
    if (job.num_requests == 0) return DONE;
    if (const int status = check_tokens(job)) return status;
    if (const int status = check_queries(job)) return status;
    if (job.threads < 1 || !job.parallel) job.threads = 1;
    const SidePlan keys(job.keys, job.integers), values(job.values, job.integers);
    int64_t count = 0;
    int heads = 0, rows = 0;
    const int64_t num_partials = make_items(job, nullptr, &count, &heads, &rows);
    if (count == 0) return DONE;
    if (job.threads > count) job.threads = (int32_t)count;
    // The size of what a thread needs is found without memory; its pieces are handed out alike.
    const int64_t scratch_bytes = (AttenderOfParts(job, keys, values, heads, rows, nullptr).num_bytes() + 127) / 64 * 64;
    const int64_t item_bytes = (count * (int64_t)sizeof(Item) + 127) / 64 * 64;
    uint8_t *memory = allocate(item_bytes + job.threads * scratch_bytes + num_partials * (int64_t)sizeof(float));
    if (!memory) return NO_MEMORY;
    Item *items = (Item *)memory;
    float *partials = (float *)(memory + item_bytes + job.threads * scratch_bytes);
    make_items(job, items, &count, &heads, &rows);
    Work work{job, keys, values, items, count, heads, rows, partials, memory + item_bytes, scratch_bytes};
    if (job.threads > 1) job.parallel(run, &work, (unsigned)job.threads, 0);
    else run(&work);
    for (int64_t r = 0, used = 0; r < job.num_requests; r++) {
        const int64_t queries = job.queries[r + 1] - job.queries[r];
        const int64_t splits = queries ? cut_of(job, r, job.queries[job.num_requests]).splits : 1;
        if (splits == 1) continue;
        merge(job, r, partials + used, splits);
        used += splits * queries * job.keys.num_heads * job.gqa * (job.values.head_dim + 2);
    }
    free(memory);
    return DONE;
}

// What a caller's structures must be equal to.
extern "C" VISIBLE int kvtuner_sizes(int32_t *sizes) {
    sizes[0] = sizeof(DecodeJob), sizes[1] = sizeof(StoreJob), sizes[2] = sizeof(CopyJob);
    return DONE;
}
