// Attention by tiles of bytes where a KV head has many queries, and by vectors elsewhere. Either gives the same bits.
#pragma once
#include "attend_item.h"
#include "tile_keys.h"
#include "tile_values.h"

constexpr int FEW_ROWS = 8;  // queries of a KV head that vectors are predicted to take as fast (docs/processor.md)

class TileAttender : public Attender {
   public:
    TileAttender(const AttendJob &job, const SidePlan &keys, const SidePlan &values, int heads, int rows, uint8_t *memory)
        : Attender(job, keys, values, heads, rows, memory) {
        if (!is_wide(rows)) return;
        const int64_t all = (int64_t)heads * tiles_in(rows);
        queries_ = scratch_.take<uint8_t>(all * query_bytes());
        wide_sums_ = scratch_.take<float>(all * sums_numbers());
        columns_ = scratch_.take<uint8_t>(BLOCK / TILE_COLUMNS * keys.steps * TILE_BYTES);
        value_columns_ = scratch_.take<uint8_t>(values.slots / 2 * values.byte_tiles * TILE_BYTES);
        weights_ = scratch_.take<uint8_t>(values.num_groups * 2 * TILE_BYTES);
        products_ = scratch_.take<int32_t>(2 * TILE_SUMS);
    }

    void attend(const Item &item, float *partials) {
        Attender::attend(item, partials);
        unit_.release();
    }

   private:
    bool is_wide(int rows) const { return k_.fits_tiles && v_.fits_tiles && rows > FEW_ROWS; }
    static int tiles_in(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
    int64_t query_bytes() const { return (int64_t)k_.num_groups * k_.steps * 2 * TILE_BYTES; }
    int64_t sums_numbers() const { return (int64_t)v_.slots / 2 * v_.byte_tiles * TILE_ROWS * TILE_COLUMNS; }
    int64_t tile_at(int head, int row) const { return (int64_t)head * tiles_in(rows_) + row / TILE_ROWS; }

    void prepare_queries(int head) override {
        if (!is_wide(rows_)) return Attender::prepare_queries(head);
        memset(queries_ + tile_at(head, 0) * query_bytes(), 0, tiles_in(rows_) * query_bytes());
        memset(wide_sums_ + tile_at(head, 0) * sums_numbers(), 0, sizeof(float) * tiles_in(rows_) * sums_numbers());
        for (int row = 0; row < rows_; row++) {
            const int64_t at = (int64_t)head * rows_ + row;
            query_scale_[at] = round_query(k_, job_.scale, query(head, row), rounded_, query_sum_ + at * k_.num_groups);
            spread_query(k_, rounded_, row % TILE_ROWS, queries_ + tile_at(head, row) * query_bytes());
        }
    }

    void attend_rows(int head, int64_t start, int n) override {
        if (!is_wide(rows_)) return Attender::attend_rows(head, start, n);
        transpose_words(place_of(k_, k_rows_, head), k_.num_words, words_);
        if (k_.side.bits == 2) key_columns<2>(words_, k_, k_ahead_, columns_);
        else if (k_.side.bits == 3) key_columns<3>(words_, k_, k_ahead_, columns_);
        else if (k_.side.bits == 4) key_columns<4>(words_, k_, k_ahead_, columns_);
        else key_columns<8>(words_, k_, k_ahead_, columns_);
        const Place place = place_of(v_, v_rows_, head);
        if (v_.side.bits == 2) value_columns<2>(place, v_, v_ahead_, value_columns_);
        else if (v_.side.bits == 3) value_columns<3>(place, v_, v_ahead_, value_columns_);
        else if (v_.side.bits == 4) value_columns<4>(place, v_, v_ahead_, value_columns_);
        else value_columns<8>(place, v_, v_ahead_, value_columns_);
        for (int first = 0; first < rows_; first += TILE_ROWS) attend_wide_tile(head, first, rows_ - first < TILE_ROWS ? rows_ - first : TILE_ROWS, start, n);
    }

    void attend_wide_tile(int head, int first, int rows, int64_t start, int n) {
        const int64_t at = (int64_t)head * rows_ + first, tile = tile_at(head, first);
        unit_.configure(rows);
        tile_scores(unit_, columns_, k_, queries_ + tile * query_bytes(), key_scales(at), rows, products_, scores_);
        float shrink[TILE_ROWS];
        for (int row = 0; row < rows; row++) shrink[row] = weigh(head, first + row, row, start, n);
        spread_weights(pairs_, v_.num_groups, rows, weights_);
        tile_sums(unit_, value_columns_, v_, weights_, weights_of(shrink, n), rows, products_, wide_sums_ + tile * sums_numbers());
    }

    void read_sums(int head, int row, float *out) const override {
        if (!is_wide(rows_)) return Attender::read_sums(head, row, out);
        read_tile_sums(wide_sums_ + tile_at(head, row) * sums_numbers(), v_, row % TILE_ROWS, out);
        add_low(head, row, out);
    }

    TileUnit unit_;
    uint8_t *queries_ = nullptr, *columns_ = nullptr, *value_columns_ = nullptr, *weights_ = nullptr;
    int32_t *products_ = nullptr;
    float *wide_sums_ = nullptr;
};
