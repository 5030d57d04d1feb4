// Runs jobs by a library of another machine, under an emulator: they come by standard input, answers go to the output.
// A job is a word, 1 to attend, 2 to store, 3 to decode and 4 to copy, its structure, and for each pointer of it a length and so many bytes.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

#include "interface.h"

namespace {

void take(void *to, size_t num_bytes) {
    if (num_bytes && fread(to, 1, num_bytes, stdin) != num_bytes) exit(0);
}

void give(const void *from, int64_t num_bytes) {
    if (num_bytes > 0) fwrite(from, 1, (size_t)num_bytes, stdout);
}

// Memory of exactly what a pointer had behind it; a length below zero stands for no pointer.
template <class T> int64_t take_buffer(T *&pointer, bool is_output) {
    int64_t num_bytes;
    take(&num_bytes, sizeof num_bytes);
    pointer = num_bytes < 0 ? nullptr : (T *)calloc(1, num_bytes + 1);
    if (num_bytes > 0 && !is_output) take((void *)pointer, num_bytes);
    return num_bytes;
}

void take_window(Window &window, int64_t *num_bytes) {
    num_bytes[0] = take_buffer(window.keys.rows, false), num_bytes[1] = take_buffer(window.values.rows, false);
    num_bytes[2] = take_buffer(window.positions, false), take_buffer(window.requests, false);
}

void release(std::initializer_list<const void *> pointers) {
    for (const void *each : pointers) free((void *)each);
}

}  // namespace

int main(int, char **arguments) {
#if defined(__x86_64__)
    syscall(SYS_arch_prctl, 0x1023, 18);  // for tiles, as instruction_sets.py asks; without them it is refused
#endif
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const auto sizes_of = (int (*)(int32_t *))dlsym(library, "kvtuner_sizes");
    const auto attend = (int (*)(const AttendJob *))dlsym(library, "kvtuner_attend");
    const auto store = (int (*)(const StoreJob *, int, void *))dlsym(library, "kvtuner_store");
    const auto decode = (int (*)(const DecodeJob *))dlsym(library, "kvtuner_decode");
    const auto copy = (int (*)(const CopyJob *))dlsym(library, "kvtuner_copy");
    int32_t sizes[3];
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
            release({job.keys.rows, job.values.rows, job.q, job.bias, job.slots, job.tokens, job.queries, job.first, job.last, job.out, job.lse});
        } else if (kind == 3) {
            DecodeJob job;
            take(&job, sizeof job);
            int64_t of_window[3];
            take_buffer(job.rows.keys.rows, false), take_buffer(job.rows.values.rows, false);
            take_buffer(job.rows.slots, false), take_buffer(job.rows.tokens, false), take_window(job.window, of_window);
            take_buffer(job.mu, false), take_buffer(job.lambda, false), take_buffer(job.q, false), take_buffer(job.sinks, false);
            const int64_t out = take_buffer(job.out, true);
            job.rows.parallel = nullptr;
            status = decode(&job);
            give(&status, sizeof status), give(job.out, out);
            release({job.rows.keys.rows, job.rows.values.rows, job.rows.slots, job.rows.tokens, job.window.keys.rows, job.window.values.rows,
                     job.window.positions, job.window.requests, job.mu, job.lambda, job.q, job.sinks, job.out});
        } else if (kind == 4) {
            CopyJob job;
            take(&job, sizeof job);
            int64_t of_window[3];
            take_window(job.window, of_window);
            take_buffer(job.k, false), take_buffer(job.v, false), take_buffer(job.tokens, false);
            status = copy(&job);
            give(&status, sizeof status), give(job.window.keys.rows, of_window[0]), give(job.window.values.rows, of_window[1]);
            give(job.window.positions, of_window[2]);
            release({job.window.keys.rows, job.window.values.rows, job.window.positions, job.window.requests, job.k, job.v, job.tokens});
        } else {
            StoreJob job;
            take(&job, sizeof job);
            const int64_t rows = take_buffer(job.side.rows, false);
            take_buffer(job.states, false), take_buffer(job.slots, false), take_buffer(job.mu, false), take_buffer(job.inverse_lambda, false);
            status = store(&job, 1, nullptr);
            give(&status, sizeof status), give(job.side.rows, rows);
            release({job.side.rows, job.states, job.slots, job.mu, job.inverse_lambda});
        }
        fflush(stdout);
    }
}
