// Attention of a few queries over a part of their request's tokens: a block of tokens after the other, for some heads.
#pragma once
#include <math.h>

#include <utility>

#include "attend_pieces.h"
#include "values.h"

constexpr float LOWEST = -1e30f;  // below every score
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

class Attender : public AttendPieces {
   public:
    Attender(const AttendJob &job, const SidePlan &keys, const SidePlan &values, int heads, int rows, uint8_t *memory)
        : AttendPieces(keys, values, heads, rows, memory), job_(job), k_(keys), v_(values) {}

    void attend(const Item &item, float *partials) {
        item_ = &item;
        rows_ = (int)(item.num_queries * job_.gqa);
        const int64_t all = (int64_t)item.num_heads * rows_;
        memset(sums_, 0, sizeof(float) * all * v_.sums_numbers());
        memset(low_, 0, sizeof(float) * all * v_.num_groups);
        memset(query_sum_, 0, sizeof(float) * all * k_.num_groups);
        for (int64_t i = 0; i < all; i++) top_[i] = LOWEST, total_[i] = 0;
        for (int head = 0; head < item.num_heads; head++) prepare_queries(head);
        if (item.first < item.last) find_rows(item.first, item.last, k_next_, v_next_);
        for (int64_t start = item.first; start < item.last; start += BLOCK) {
            const int n = (int)(item.last - start < BLOCK ? item.last - start : BLOCK);
            const bool follows = start + BLOCK < item.last;
            std::swap(k_rows_, k_next_), std::swap(v_rows_, v_next_);
            if (follows) find_rows(start + BLOCK, item.last, k_next_, v_next_);
            if (k_.is_per_channel()) find_runs(start, n);
            else read_scale_words(k_, k_rows_, k_scale_words_);
            read_scale_words(v_, v_rows_, v_scale_words_);
            for (int head = 0; head < item.num_heads; head++) {
                k_ahead_ = ahead_of(k_, k_next_, follows, head), v_ahead_ = ahead_of(v_, v_next_, follows, head);
                attend_block(head, start, n);
            }
        }
        for (int head = 0; head < item.num_heads; head++) finish(head, partials);
    }

   protected:
    int64_t slot_of(int64_t token) const {
        const int64_t at = job_.tokens[item_->request] + token;
        return job_.slots ? job_.slots[at] : at;
    }

    const uint8_t *row(const SidePlan &plan, int64_t token) const { return plan.side.rows + slot_of(token) * plan.side.row_stride; }

    // The tokens of a block that share scales, those that follow one another in one run.
    void find_runs(int64_t start, int n) {
        num_runs_ = 0;
        for (int t = 0; t < n; t++) {
            const int64_t group = slot_of(start + t) / k_.side.token_group;
            if (num_runs_ && runs_[num_runs_ - 1].group == group) runs_[num_runs_ - 1].last = t + 1;
            else runs_[num_runs_++] = {t, t + 1, group};
        }
    }

    // Behind the last token stand rows of the first, whose weights are zeros.
    void find_rows(int64_t start, int64_t last, const uint8_t **k_rows, const uint8_t **v_rows) const {
        for (int64_t t = 0; t < BLOCK; t++) {
            const int64_t token = start + t < last ? start + t : start;
            k_rows[t] = row(k_, token), v_rows[t] = row(v_, token);
            if (k_.has_codes) __builtin_prefetch(k_rows[t] + k_.side.first_word);
            if (v_.has_codes) __builtin_prefetch(v_rows[t] + v_.side.first_word);
        }
    }

    Ahead ahead_of(const SidePlan &plan, const uint8_t *const *rows, bool follows, int head) const {
        return {follows ? rows : nullptr, (item_->head + head) * plan.head_bytes, plan.head_bytes, 0};
    }

    void read_scale_words(const SidePlan &plan, const uint8_t *const *rows, int32_t *words) const {
        if (!plan.has_codes) return;
        const int64_t first = plan.side.first_word + (int64_t)item_->head * plan.num_groups * plan.side.word_bits / 8;
        const int num_words = (item_->num_heads * plan.num_groups * plan.side.word_bits / 8 + 3) / 4;
        transpose_words({rows, first, plan.limit()}, num_words, words);
    }

    // The codes of a head in each row; of 3 bits, copies whose units are whole.
    Place place_of(const SidePlan &plan, const uint8_t *const *rows, int head) const {
        const int of_all = item_->head + head;
        if (plan.side.bits != 3) return {rows, of_all * plan.head_bytes, plan.limit()};
        for (int t = 0; t < BLOCK; t++) {
            uint16_t *to = staging_ + t * staged_row_;
            stage_three_bits(rows[t], plan.side.num_heads, of_all, plan.units, to);
            staged_rows_[t] = (const uint8_t *)to;
        }
        return {staged_rows_, 0, (const uint8_t *)(staging_ + staged_row_ * BLOCK + 64)};
    }

    // Queries as the products of a tile take them: integers with the value of one, or scaled float32.
    virtual void prepare_queries(int head) {
        const int D = k_.side.head_dim;
        for (int first = 0, tile; first < rows_; first += tile) {
            tile = tile_of(rows_ - first);
            for (int g = 0; g < tile; g++) {
                const float *x = query(head, first + g);
                const int64_t at = (int64_t)head * rows_ + first + g;
                float *group_sums = query_sum_ + at * k_.num_groups;
                int32_t *to = q_ + ((int64_t)head * rows_ + first) * k_.query_numbers();
                if (k_.is_per_channel()) {
                    float *padded = (float *)to + g * k_.stride;
                    for (int c = 0; c < k_.stride; c++) padded[c] = c < D ? x[c] * job_.scale : 0.0f;
                } else if (k_.integers) {
                    query_scale_[at] = round_query(k_, job_.scale, x, rounded_, group_sums);
                    pair_query(k_, rounded_, tile, g, to);
                } else {
                    for (int c = 0; c < D; c++) group_sums[c / k_.channels_per_group()] += x[c] * job_.scale;
                    for (int c = 0; c < D; c++) ((float *)to)[g * D + c] = x[c] * job_.scale;
                }
            }
        }
    }

    static int tile_of(int rows) { return rows >= NARROW ? NARROW : rows >= 2 ? 2 : 1; }

    const float *query(int head, int r) const {
        const int64_t query = item_->query + r / job_.gqa, all_heads = (int64_t)k_.side.num_heads * job_.gqa;
        return job_.q + (query * all_heads + (int64_t)(item_->head + head) * job_.gqa + r % job_.gqa) * k_.side.head_dim;
    }

    void attend_block(int head, int64_t start, int n) {
        if (k_.is_per_channel()) {
            for (int i = 0; i < num_runs_; i++)
                channel_scales(k_, runs_[i].group, item_->head + head, channel_words_, channel_scale_ + i * k_.stride, channel_minimum_ + i * k_.stride);
        } else if (k_.has_codes) {
            scales_of(k_.side, k_scale_words_, head * k_.num_groups, k_scale_, k_minimum_);
        }
        if (v_.has_codes) scales_of(v_.side, v_scale_words_, head * v_.num_groups, v_scale_, v_minimum_);
        if (v_.integers) find_zeros();
        attend_rows(head, start, n);
    }

    virtual void attend_rows(int head, int64_t start, int n) {
        transpose_words(place_of(k_, k_rows_, head), k_.num_words, words_);
        if (!k_.integers) key_numbers(k_.side, words_, numbers_);
        const Place place = place_of(v_, v_rows_, head);
        if (!v_.integers) {
            value_numbers(v_.side, place, n, v_.stride, values_);
        } else {
            for (int part = 0; part < (v_.side.bits == 3 ? 2 : 1); part++) {
                const Place of_part = {place.rows, place.offset + part * 2 * v_.units, place.limit};
                uint16_t *to = units_ + (int64_t)part * v_.chunks * BLOCK * 2 * v_.lanes;
                if (LANES >= 16 && v_.lanes == 16) interleave_units<(LANES >= 16 ? 16 : 4)>(of_part, v_.chunks, to);
                else if (LANES >= 8 && v_.lanes == 8) interleave_units<(LANES >= 8 ? 8 : 4)>(of_part, v_.chunks, to);
                else interleave_units<4>(of_part, v_.chunks, to);
            }
        }
        for (int first = 0, tile; first < rows_; first += tile) {
            tile = tile_of(rows_ - first);
            if (tile == 4) attend_tile<4>(head, first, start, n);
            else if (tile == 2) attend_tile<2>(head, first, start, n);
            else attend_tile<1>(head, first, start, n);
        }
    }

    // The codes of zero, or those next to it, negated.
    void find_zeros() {
        const float top = (float)((1 << v_.side.bits) - 1);
        for (int t = 0; t < v_.num_groups * BLOCK; t += LANES) {
            const F place = load<F>(v_minimum_ + t) / load<F>(v_scale_ + t), inside = place > -top ? place : F{} - top;
            save(v_zero_ + t, inside < 0 ? inside : F{});
        }
    }

    // Scores of keys per channel, a run of tokens after the other; behind the last token of the block there are none.
    template <int G> void score_runs(const float *q) {
        for (int i = 0; i < num_runs_; i++) {
            const float *scale = channel_scale_ + i * k_.stride, *minimum = channel_minimum_ + i * k_.stride;
            for (int g = 0; g < G; g++) fold_query(k_, q + g * k_.stride, scale, minimum, g, folded_);
            if (!k_.integers) run_float_scores<G>(numbers_, k_, folded_, runs_[i], scores_);
            else if (k_.side.bits == 2) run_integer_scores<2, G>(words_, k_.pairs, folded_, runs_[i], k_ahead_, scores_);
            else if (k_.side.bits == 3) run_integer_scores<3, G>(words_, k_.pairs, folded_, runs_[i], k_ahead_, scores_);
            else if (k_.side.bits == 4) run_integer_scores<4, G>(words_, k_.pairs, folded_, runs_[i], k_ahead_, scores_);
            else run_integer_scores<8, G>(words_, k_.pairs, folded_, runs_[i], k_ahead_, scores_);
        }
    }

    KeyScales key_scales(int64_t at) const {
        return {query_scale_ + at, query_sum_ + at * k_.num_groups, k_.has_codes ? k_scale_ : nullptr, k_minimum_,
                k_.num_groups, k_.slots_per_group, k_.channels_per_group()};
    }

    Weights weights_of(const float *shrink, int n) const {
        return {pairs_, back_, exact_, shrink, v_.num_groups, v_.slots_per_group, v_.channels_per_group(), n};
    }

    template <int G> void score(int64_t at) {
        const int32_t *q = q_ + at * k_.query_numbers();
        if (k_.is_per_channel()) {
            score_runs<G>((const float *)q);
            return;
        }
        const KeyScales scales = key_scales(at);
        if (!k_.integers) float_scores<G>(numbers_, k_.side.head_dim, (const float *)q, scales, scores_);
        else if (k_.side.bits == 2) integer_scores<2, G>(words_, k_.pairs, q, scales, k_ahead_, scores_);
        else if (k_.side.bits == 3) integer_scores<3, G>(words_, k_.pairs, q, scales, k_ahead_, scores_);
        else if (k_.side.bits == 4) integer_scores<4, G>(words_, k_.pairs, q, scales, k_ahead_, scores_);
        else integer_scores<8, G>(words_, k_.pairs, q, scales, k_ahead_, scores_);
    }

    template <int G> void attend_tile(int head, int first, int64_t start, int n) {
        const int64_t at = (int64_t)head * rows_ + first;
        score<G>(at);
        float shrink[G];
        for (int g = 0; g < G; g++) shrink[g] = weigh(head, first + g, g, start, n);
        const Weights weights = weights_of(shrink, n);
        float *sums = sums_ + at * v_.sums_numbers();
        if (!v_.integers) float_sums<G>(values_, v_.stride, v_.side.head_dim, weights, sums);
        else if (LANES >= 16 && v_.lanes == 16) add_sums<(LANES >= 16 ? 16 : 4), G>(weights, sums);
        else if (LANES >= 8 && v_.lanes == 8) add_sums<(LANES >= 8 ? 8 : 4), G>(weights, sums);
        else add_sums<4, G>(weights, sums);
    }

    template <int L, int G> void add_sums(const Weights &weights, float *sums) {
        if (v_.side.bits == 2) integer_sums<L, 2, G>(units_, v_.chunks, weights, v_ahead_, sums);
        else if (v_.side.bits == 3) integer_sums<L, 3, G>(units_, v_.chunks, weights, v_ahead_, sums);
        else if (v_.side.bits == 4) integer_sums<L, 4, G>(units_, v_.chunks, weights, v_ahead_, sums);
        else integer_sums<L, 8, G>(units_, v_.chunks, weights, v_ahead_, sums);
    }

    // Turns the scores of one query into weights, and returns what becomes of its sums so far.
    float weigh(int head, int r, int g, int64_t start, int n) {
        const int64_t at = (int64_t)head * rows_ + r, query = item_->query + r / job_.gqa;
        float *scores = scores_ + g * BLOCK;
        if (job_.bias || job_.logit_cap > 0) cap(scores, query, head, r);
        const int before = within(job_.first ? job_.first[query] - start : 0, n), seen = within(job_.last ? job_.last[query] - start : n, n);
        F best = F{} + top_[at];
        for (int t = 0; t < BLOCK; t += LANES) {
            F x = load<F>(scores + t) * LOG2E;
            if (t + LANES > seen || t < before) for (int i = 0; i < LANES; i++) x[i] = before <= t + i && t + i < seen ? x[i] : LOWEST;
            save(scores + t, x);
            best = x > best ? x : best;
        }
        const float top = largest(best), shrink = exp2f(top_[at] - top);
        F whole = {};
        for (int t = 0; t < BLOCK; t += LANES) {
            F x = exp2_of(load<F>(scores + t) - top);
            if (t + LANES > seen || t < before) for (int i = 0; i < LANES; i++) x[i] = before <= t + i && t + i < seen ? x[i] : 0;
            save(scores + t, x);
            whole += x;
        }
        top_[at] = top;
        total_[at] = total_[at] * shrink + sum(whole);
        for (int group = 0; group < v_.num_groups; group++) weigh_group(scores, at, g, group, shrink);
        return shrink;
    }

    static int within(int64_t token, int n) { return token < 0 ? 0 : token < n ? (int)token : n; }

    void cap(float *scores, int64_t query, int head, int r) const {
        const int64_t all_heads = (int64_t)k_.side.num_heads * job_.gqa;
        const float bias = job_.bias ? job_.bias[query * all_heads + (int64_t)(item_->head + head) * job_.gqa + r % job_.gqa] : 0;
        for (int t = 0; t < BLOCK; t += LANES) {
            const F x = load<F>(scores + t) + bias;
            save(scores + t, job_.logit_cap > 0 ? job_.logit_cap * tanh_of(x / job_.logit_cap) : x);
        }
    }

    // The weights of one group of channels: times the scales of its tokens, and their sum times the minimums.
    void weigh_group(const float *weights, int64_t at, int g, int group, float shrink) {
        const int of_tile = g * v_.num_groups + group;
        float *exact = exact_ + of_tile * BLOCK;
        if (!v_.has_codes) {
            memcpy(exact, weights, sizeof(float) * BLOCK);
            return;
        }
        Magnitude most;
        F low = {};
        for (int t = 0; t < BLOCK; t += LANES) {
            const F p = load<F>(weights + t), w = p * load<F>(v_scale_ + group * BLOCK + t);
            low = fma(p, load<F>(v_minimum_ + group * BLOCK + t), low);
            most.add(w);
            save(exact + t, w);
        }
        if (v_.integers) low += round_weights(exact, of_tile, group, most.largest());
        float &sum_of_low = low_[at * v_.num_groups + group];
        sum_of_low = sum_of_low * shrink + sum(low);
    }

    // Weights as integers. Codes are positive, so that an error of a weight would add up over a whole group, to what a
    // Hadamard transform gathers in one channel: it is taken back for the code that stands for zero. Returns how much.
    F round_weights(const float *exact, int of_tile, int group, float most) {
        const bool finite = __builtin_isfinite(most);
        const float factor = finite && most > 1e-30f ? LARGEST_INTEGER / most : 0;
        const float back = finite ? factor ? most / LARGEST_INTEGER : 0.0f : NAN;
        int16_t *pairs = (int16_t *)(pairs_ + of_tile * (BLOCK / 2));
        F correction = {};
        for (int t = 0; t < BLOCK; t += LANES) {
            const F w = finite ? load<F>(exact + t) : F{};
            // The lowest bits of a number of this size are the integer that it is rounded to.
            const F rounded = w * factor + 0x1.8p23f;
            save(pairs + t, __builtin_convertvector((I)rounded, Vectors<LANES>::S));
            const F error = (rounded - 0x1.8p23f) * back - w;
            correction = fma(error, load<F>(v_zero_ + group * BLOCK + t), correction);
        }
        back_[of_tile] = back;
        return correction;
    }

    // The sums of a query so far, [head_dim].
    virtual void read_sums(int head, int r, float *out) const {
        const int first = first_of_tile(r), tile = tile_of(rows_ - first), g = r - first;
        const float *sums = sums_ + ((int64_t)head * rows_ + first) * v_.sums_numbers();
        if (v_.integers) read_integer_sums(sums, v_.slots, v_.units, v_.chunks, v_.lanes, tile, g, out);
        else memcpy(out, sums + g * v_.side.head_dim, sizeof(float) * v_.side.head_dim);
        if (v_.has_codes) add_low(head, r, out);
    }

    // The sums of weights times minimums, which all channels of a group have in common.
    void add_low(int head, int r, float *out) const {
        const float *low = low_ + ((int64_t)head * rows_ + r) * v_.num_groups;
        for (int group = 0; group < v_.num_groups; group++)
            for (int c = 0; c < v_.channels_per_group(); c++) *out++ += low[group];
    }

    int first_of_tile(int r) const {
        int first = r / 4 * 4;
        if (rows_ - first >= 4) return first;
        if (rows_ - first >= 2 && r - first >= 2) first += 2;
        return rows_ - first >= 2 || r == first ? first : r;
    }

    void finish(int head, float *partials) const {
        const int64_t all_heads = (int64_t)v_.side.num_heads * job_.gqa;
        const int D = v_.side.head_dim;
        for (int r = 0; r < rows_; r++) {
            const int64_t at = (int64_t)head * rows_ + r, query = item_->query + r / job_.gqa;
            const int64_t of_head = (int64_t)(item_->head + head) * job_.gqa + r % job_.gqa;
            float *out = job_.out + (query * all_heads + of_head) * D;
            float divisor = total_[at];
            if (item_->partial >= 0) {
                const int64_t query_in_request = query - job_.queries[item_->request];
                float *part = partials + item_->partial + (query_in_request * all_heads + of_head) * (D + 2);
                part[0] = top_[at], part[1] = total_[at];
                out = part + 2, divisor = 1;
            } else {
                job_.lse[query * all_heads + of_head] = total_[at] == 0 ? -INFINITY : top_[at] * LN2 + logf(total_[at]);
            }
            read_sums(head, r, out);
            for (int c = 0; c < D; c++) out[c] = divisor == 0 ? 0 : out[c] / divisor;
        }
    }

    const AttendJob &job_;
    const SidePlan &k_, &v_;
    const Item *item_ = nullptr;
    int rows_ = 0;
    Ahead k_ahead_ = {}, v_ahead_ = {};
};
