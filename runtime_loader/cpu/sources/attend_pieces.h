// What a thread keeps while it attends: the rows, words, codes and scales of a block, and the sums of its queries.
#pragma once
#include "scratch.h"
#include "token_groups.h"

constexpr int NARROW = 4;            // queries of a tile whose sums stay in registers
constexpr int MOST_QUERIES = HAS_TILES ? TILE_ROWS : NARROW;
constexpr int SPARE = 2 * LANES;     // numbers behind a piece, which vectors reach into

class AttendPieces {
   public:
    int64_t num_bytes() const { return scratch_.used(); }

   protected:
    // For all heads of a part and `rows` queries of each; without memory its size is counted alone.
    AttendPieces(const SidePlan &k, const SidePlan &v, int heads, int rows, uint8_t *memory) : scratch_(memory) {
        const int64_t all = (int64_t)heads * rows;
        k_rows_ = scratch_.take<const uint8_t *>(BLOCK);
        v_rows_ = scratch_.take<const uint8_t *>(BLOCK);
        k_next_ = scratch_.take<const uint8_t *>(BLOCK);
        v_next_ = scratch_.take<const uint8_t *>(BLOCK);
        staged_rows_ = scratch_.take<const uint8_t *>(BLOCK);
        k_scale_words_ = scratch_.take<int32_t>((int64_t)k.words_of_heads(heads) * BLOCK);
        v_scale_words_ = scratch_.take<int32_t>((int64_t)v.words_of_heads(heads) * BLOCK);
        words_ = scratch_.take<int32_t>((int64_t)(k.num_words + TILE) * BLOCK);
        numbers_ = scratch_.take<float>(k.integers ? 0 : (int64_t)k.side.head_dim * BLOCK + SPARE);
        values_ = scratch_.take<float>(v.integers ? 0 : (int64_t)v.stride * BLOCK);
        const int widest = k.units > v.units ? k.units : v.units;
        staged_row_ = 2 * widest + 32;
        staging_ = scratch_.take<uint16_t>(staged_row_ * BLOCK + 64);
        units_ = scratch_.take<uint16_t>(v.integers ? (int64_t)v.chunks * BLOCK * 2 * v.lanes * 2 : 0);
        k_scale_ = scratch_.take<float>(k.num_groups * BLOCK);
        k_minimum_ = scratch_.take<float>(k.num_groups * BLOCK);
        v_scale_ = scratch_.take<float>(v.num_groups * BLOCK);
        v_minimum_ = scratch_.take<float>(v.num_groups * BLOCK);
        v_zero_ = scratch_.take<float>(v.num_groups * BLOCK);
        scores_ = scratch_.take<float>(MOST_QUERIES * BLOCK);
        exact_ = scratch_.take<float>(MOST_QUERIES * v.num_groups * BLOCK);
        pairs_ = scratch_.take<int32_t>(MOST_QUERIES * v.num_groups * BLOCK / 2);
        back_ = scratch_.take<float>(MOST_QUERIES * v.num_groups);
        const int64_t channels = k.is_per_channel() ? k.stride : 0;
        runs_ = scratch_.take<TokenRun>(channels ? BLOCK : 0);
        channel_words_ = scratch_.take<int32_t>(channels);
        channel_scale_ = scratch_.take<float>(channels * BLOCK);
        channel_minimum_ = scratch_.take<float>(channels * BLOCK);
        folded_.integers = scratch_.take<int32_t>(channels ? NARROW * k.slots * k.pairs + SPARE : 0);
        folded_.numbers = scratch_.take<float>(channels ? NARROW * channels + SPARE : 0);
        folded_.back = scratch_.take<float>(NARROW);
        folded_.low = scratch_.take<float>(NARROW);
        rounded_ = scratch_.take<int16_t>(k.integers ? k.side.head_dim : 0);
        q_ = scratch_.take<int32_t>(all * k.query_numbers());
        query_scale_ = scratch_.take<float>(all);
        query_sum_ = scratch_.take<float>(all * k.num_groups);
        sums_ = scratch_.take<float>(all * v.sums_numbers());
        top_ = scratch_.take<float>(all);
        total_ = scratch_.take<float>(all);
        low_ = scratch_.take<float>(all * v.num_groups);
    }

    Scratch scratch_;
    int64_t staged_row_ = 0;
    const uint8_t **k_rows_, **v_rows_, **k_next_, **v_next_, **staged_rows_;
    int32_t *k_scale_words_, *v_scale_words_, *words_, *pairs_, *q_;
    uint16_t *staging_, *units_;
    int16_t *rounded_;
    float *numbers_, *values_, *k_scale_, *k_minimum_, *v_scale_, *v_minimum_, *v_zero_, *scores_, *exact_, *back_;
    float *query_scale_, *query_sum_, *sums_, *top_, *total_, *low_;
    // Of keys per channel: the runs of a block that share scales, the scales of each, and the queries of a tile.
    TokenRun *runs_;
    int num_runs_ = 0;
    int32_t *channel_words_;
    float *channel_scale_, *channel_minimum_;  // [BLOCK, stride], by run
    FoldedQueries folded_ = {};
};
