// Products of tiles of random bytes, compared with loops: what a processor with AMX, emulated or not, must pass first.
// It is built without a C++ runtime or shared libraries: gcc -O2 -static -mamx-tile -mamx-int8 tiles.c
#include <immintrin.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILES = 18 };

struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static uint8_t a[16][64], b[16][64];
static int32_t of_signed[16][16], of_unsigned[16][16];

// The sums that differ for a tile of m rows by one of k rows of 4 bytes for each of n columns.
static int wrong_sums(int m, int k, int n) {
    struct Shapes shapes = {.palette = 1, .rows = {m, m, k, m}, .row_bytes = {4 * n, 4 * k, 4 * n, 4 * n}};
    for (int row = 0; row < 16; row++)
        for (int i = 0; i < 64; i++) a[row][i] = rand() >> 7, b[row][i] = rand() >> 9;
    memset(of_signed, 0, sizeof of_signed), memset(of_unsigned, 0, sizeof of_unsigned);
    // g++ 12 does not know that the next instructions read these.
    __asm__ volatile("" : : "r"(&shapes), "r"(a), "r"(b) : "memory");
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(3);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, b, 64);
    sched_yield();  // another process has its own tiles meanwhile
    _tile_dpbsud(0, 1, 2);
    _tile_dpbuud(3, 1, 2);
    _tile_stored(0, of_signed, 64);
    _tile_stored(3, of_unsigned, 64);
    _tile_release();
    int wrong = 0;
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            int32_t expected[2] = {0, 0};
            for (int i = 0; row < m && column < n && i < 4 * k; i++) {
                const int factor = b[i / 4][4 * column + i % 4];
                expected[0] += (int8_t)a[row][i] * factor, expected[1] += a[row][i] * factor;
            }
            wrong += (expected[0] != of_signed[row][column]) + (expected[1] != of_unsigned[row][column]);
        }
    return wrong;
}

int main(void) {
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILES)) {
        perror("tiles are refused");
        return 1;
    }
    int wrong = 0;
    const pid_t other = fork();
    srand(other == 0);
    for (int times = 0; times < 200; times++) wrong += wrong_sums(1 + rand() % 16, 1 + rand() % 16, 1 + rand() % 16);
    if (other == 0) return wrong != 0;
    int status;
    wait(&status);
    printf("%d sums of tiles differ, another process ended with %d\n", wrong, WEXITSTATUS(status));
    return wrong || status;
}
