// What Python hands over and gets back. Knows nothing of Python or torch; ctypes structures of the same fields mirror it.
#pragma once
#include <stdint.h>

enum Numbers : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// Keys or values of one layer in a pool of token slots; docs/format.md has the bytes of a row.
struct Side {
    uint8_t *rows;
    int64_t num_rows, row_bytes, row_stride, first_word;  // the stride and the place of scale words in bytes
    int32_t bits, numbers, num_heads, head_dim, group_size, word_bits;  // `numbers` of rows of 16 bits
    int32_t token_group;  // the token slots, from a multiple of that on, that share the scales of a channel; else 1

    // The bytes of a row that a group's scale words have.
    int64_t token_share() const { return ((int64_t)4 * num_heads * head_dim + token_group - 1) / token_group; }
    // The rows of whole groups, of which others would have scales beyond the last.
    int64_t whole_rows() const { return num_rows / token_group * token_group; }
};

// Attention of queries over the tokens of their requests, as if no others were there.
struct AttendJob {
    Side keys, values;
    const float *q;          // [queries, num_heads * gqa, head_dim] in the space of the keys
    const float *bias;       // [queries, num_heads * gqa], added to scaled products; or null
    const int64_t *slots;    // token slots; null where token i is row i
    const int64_t *tokens;   // [requests + 1]: request r has tokens[r] to tokens[r + 1]
    const int64_t *queries;  // [requests + 1]: and the queries queries[r] to queries[r + 1]
    const int64_t *first;    // [queries]: a query reads its request's tokens from this one on; null for all
    const int64_t *last;     // [queries]: and up to this one, without it; null for all
    float *out;              // [queries, num_heads * gqa, v_head_dim] in the space of the values; zeros without tokens
    float *lse;              // [queries, num_heads * gqa]: the logarithm of the sum of weights; -infinity without tokens
    int64_t num_slots, num_requests, num_queries;
    int32_t gqa, integers, threads;  // integers: products in int16
    float scale, logit_cap;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel, or null for one thread
};

// The copies of an exact window, in places by request slot.
struct Window {
    Side keys, values;         // token slots are places of all request slots, one after the other
    int32_t *positions;        // [request slots, places]: the position that a copy is of, or a negative number
    const int64_t *requests;   // [requests]: request slots; null without a window
    int64_t num_request_slots, num_places, residual_length, num_sinks;
};

// Attention of the last token of each request, from its queries in model space to its output.
struct DecodeJob {
    AttendJob rows;            // of stored rows; `q`, `bias`, `queries`, `out` and `lse` are made here
    Window window;
    const float *mu, *lambda;  // of keys, [num_heads, head_dim]; without `mu` all scores of a query lack the same number
    const void *q;             // [requests, num_heads * gqa, head_dim], requests apart by the stride in numbers
    void *out;                 // [requests, num_heads * gqa, v_head_dim] likewise
    const float *sinks;        // [num_heads * gqa]: the score of a token without a value; or null
    int64_t q_stride, out_stride;
    int32_t q_numbers, out_numbers, k_block, v_block;  // the blocks of Hadamard transforms; a block of 1 is none
    float k_factor, v_factor;
};

// The copies of the last token of each request, which become those of its place.
struct CopyJob {
    Window window;
    const void *k, *v;      // [requests, num_heads, head_dim] in the numbers of the copies
    const int64_t *tokens;  // [requests + 1]: request r has tokens[r + 1] - tokens[r], the last included
    int64_t num_requests, k_stride, v_stride;  // strides in bytes
};

// Keys or values that become rows.
struct StoreJob {
    Side side;
    const void *states;                // [tokens, num_heads, head_dim] with strides in numbers; channels side by side
    const int64_t *slots;              // [tokens]; of token groups each in order, from a multiple of their size on
    const float *mu, *inverse_lambda;  // [num_heads, head_dim]; null where the transform has none
    int64_t num_tokens, token_stride, head_stride;
    int32_t numbers, hadamard_block, symmetric, fitted;  // a block of 1 is no Hadamard transform
    float hadamard_factor;
};

// A cause for each: native_attention.py has their words.
enum Status : int { DONE = 0, BAD_SLOT = 1, BAD_SPAN = 2, NO_MEMORY = 3, BROKEN_GROUP = 4, BAD_REQUEST = 5, BAD_PLACES = 6 };

#define VISIBLE __attribute__((visibility("default")))

extern "C" int kvtuner_attend(const AttendJob *job);
