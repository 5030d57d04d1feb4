// Runs jobs by a library of another machine, under an emulator: they come by standard input, answers go to the output.
// A job is a word, 1 to attend and 2 to store, its structure, and for each pointer of it a length and so many bytes.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "interface.h"

namespace {

void take(void *to, size_t num_bytes) {
    if (num_bytes && fread(to, 1, num_bytes, stdin) != num_bytes) exit(0);
}

void give(const void *from, size_t num_bytes) { fwrite(from, 1, num_bytes, stdout); }

// Memory of exactly what a pointer had behind it; a length below zero stands for no pointer.
template <class T> int64_t take_buffer(T *&pointer, bool is_output) {
    int64_t num_bytes;
    take(&num_bytes, sizeof num_bytes);
    pointer = num_bytes < 0 ? nullptr : (T *)calloc(1, num_bytes + 1);
    if (num_bytes > 0 && !is_output) take((void *)pointer, num_bytes);
    return num_bytes;
}

}  // namespace

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const auto sizes_of = (int (*)(int32_t *))dlsym(library, "kvtuner_sizes");
    const auto attend = (int (*)(const AttendJob *))dlsym(library, "kvtuner_attend");
    const auto store = (int (*)(const StoreJob *, int, void *))dlsym(library, "kvtuner_store");
    int32_t sizes[2];
    sizes_of(sizes);
    give(sizes, sizeof sizes);
    fflush(stdout);
    for (int32_t kind;;) {
        take(&kind, sizeof kind);
        int32_t status;
        if (kind == 1) {
            AttendJob job;
            take(&job, sizeof job);
            take_buffer(job.keys.rows, false), take_buffer(job.values.rows, false);
            take_buffer(job.q, false), take_buffer(job.bias, false), take_buffer(job.slots, false);
            take_buffer(job.tokens, false), take_buffer(job.queries, false), take_buffer(job.first, false);
            take_buffer(job.last, false);
            const int64_t out = take_buffer(job.out, true), lse = take_buffer(job.lse, true);
            job.parallel = nullptr;
            status = attend(&job);
            give(&status, sizeof status), give(job.out, out), give(job.lse, lse);
            for (const void *each : {(const void *)job.keys.rows, (const void *)job.values.rows, (const void *)job.q, (const void *)job.bias,
                                     (const void *)job.slots, (const void *)job.tokens, (const void *)job.queries, (const void *)job.first,
                                     (const void *)job.last, (const void *)job.out, (const void *)job.lse})
                free((void *)each);
        } else {
            StoreJob job;
            take(&job, sizeof job);
            const int64_t rows = take_buffer(job.side.rows, false);
            take_buffer(job.states, false), take_buffer(job.slots, false), take_buffer(job.mu, false), take_buffer(job.inverse_lambda, false);
            status = store(&job, 1, nullptr);
            give(&status, sizeof status), give(job.side.rows, rows);
            for (const void *each : {(const void *)job.side.rows, job.states, (const void *)job.slots, (const void *)job.mu, (const void *)job.inverse_lambda})
                free((void *)each);
        }
        fflush(stdout);
    }
}
