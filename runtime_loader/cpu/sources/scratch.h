// Memory of one thread, of a size that is known before anything runs.
#pragma once
#include <stdint.h>
#include <stdlib.h>

// Hands out pieces of one allocation, each from a cache line on. Without memory it counts what would be needed.
class Scratch {
   public:
    explicit Scratch(uint8_t *memory) : memory_(memory) {}
    template <class T> T *take(int64_t count) {
        T *piece = memory_ ? (T *)(memory_ + used_) : nullptr;
        used_ += (count * (int64_t)sizeof(T) + 127) / 64 * 64;
        return piece;
    }
    int64_t used() const { return used_; }

   private:
    uint8_t *memory_;
    int64_t used_ = 0;
};

inline uint8_t *allocate(int64_t num_bytes) {
    return (uint8_t *)aligned_alloc(64, (size_t)((num_bytes + 64) / 64 * 64));
}
