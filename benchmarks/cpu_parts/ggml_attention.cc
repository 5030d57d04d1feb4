// One decoding step by ggml's flash attention over a cache of its own, as llama.cpp calls it; for ctypes.
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

namespace {

struct Cache {
    ggml_context *context;
    ggml_cgraph *graph;
    ggml_tensor *q, *k, *v, *output;
};

struct Attention {
    std::vector<Cache> copies;
    std::vector<uint8_t> work;
    int threads;
    size_t next = 0;
};

// The cache of a token has its heads side by side, and attention reads it head by head.
Cache make_cache(ggml_type type, int64_t tokens, int64_t batch, int64_t heads, int64_t gqa, int64_t channels) {
    const size_t row = ggml_row_size(type, channels * heads);
    ggml_init_params params = {2 * row * tokens * batch + 64 * ggml_tensor_overhead() + ggml_graph_overhead() +
                                   2 * sizeof(float) * channels * heads * gqa * batch + (1 << 20),
                               nullptr, false};
    Cache cache;
    cache.context = ggml_init(params);
    cache.k = ggml_new_tensor_4d(cache.context, type, channels, heads, tokens, batch);
    cache.v = ggml_new_tensor_4d(cache.context, type, channels, heads, tokens, batch);
    cache.q = ggml_new_tensor_4d(cache.context, GGML_TYPE_F32, channels, 1, heads * gqa, batch);
    cache.output = ggml_flash_attn_ext(cache.context, cache.q, ggml_permute(cache.context, cache.k, 0, 2, 1, 3),
                                       ggml_permute(cache.context, cache.v, 0, 2, 1, 3), nullptr, 1 / sqrtf((float)channels), 0, 0);
    cache.graph = ggml_new_graph(cache.context);
    ggml_build_forward_expand(cache.graph, cache.output);
    return cache;
}

}  // namespace

// Caches of one type with the same keys and values, float32 [batch, tokens, heads, channels]. What they round to goes
// back to `k` and `v`.
extern "C" void *ggml_attention_new(const char *name, int64_t tokens, int64_t batch, int64_t heads, int64_t gqa, int64_t channels,
                                    int copies, int threads, const float *q, float *k, float *v) {
    const ggml_type type = !strcmp(name, "f16") ? GGML_TYPE_F16 : !strcmp(name, "q8_0") ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
    ggml_cpu_init();
    Attention *attention = new Attention;
    attention->threads = threads;
    const int64_t rows = batch * tokens * heads;
    for (int copy = 0; copy < copies; copy++) {
        Cache cache = make_cache(type, tokens, batch, heads, gqa, channels);
        memcpy(cache.q->data, q, ggml_nbytes(cache.q));
        ggml_quantize_chunk(type, k, cache.k->data, 0, rows, channels, nullptr);
        ggml_quantize_chunk(type, v, cache.v->data, 0, rows, channels, nullptr);
        attention->copies.push_back(cache);
    }
    const auto to_float = ggml_get_type_traits(type)->to_float;
    to_float(attention->copies[0].k->data, k, rows * channels);
    to_float(attention->copies[0].v->data, v, rows * channels);
    return attention;
}

// A step over the next copy. Threads beside the first live as long as it does: none of them waits in a loop afterwards.
extern "C" int ggml_attention_step(void *pointer) {
    Attention &attention = *(Attention *)pointer;
    Cache &cache = attention.copies[attention.next++ % attention.copies.size()];
    ggml_cplan plan = ggml_graph_plan(cache.graph, attention.threads, nullptr);
    if (attention.work.size() < plan.work_size) attention.work.resize(plan.work_size);
    plan.work_data = attention.work.data();
    return ggml_graph_compute(cache.graph, &plan);
}

extern "C" int64_t ggml_attention_bytes(void *pointer) {
    const Cache &cache = ((Attention *)pointer)->copies[0];
    return (int64_t)(ggml_nbytes(cache.k) + ggml_nbytes(cache.v));
}

// The output of the first copy, float32 [batch, heads * gqa, channels].
extern "C" const float *ggml_attention_output(void *pointer) { return (const float *)((Attention *)pointer)->copies[0].output->data; }

extern "C" void ggml_attention_free(void *pointer) {
    Attention *attention = (Attention *)pointer;
    for (Cache &cache : attention->copies) ggml_free(cache.context);
    delete attention;
}
