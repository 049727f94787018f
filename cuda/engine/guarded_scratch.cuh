// SPDX-License-Identifier: Apache-2.0
// The memory of a Scratch. In debug builds with guard bands it lies between guard bytes, which no call may change.
#pragma once
#include "game_api.cuh"

namespace guarded_scratch {

#if !defined(BOUNDS_CHECKED)

typedef Scratch Memory;
HD Scratch* begin(Memory* memory) { return memory; }
HD void check(const Memory*) {}

#else

struct Memory {
    // Volatile: a compiler may assume that an access to `scratch` does not reach them.
    volatile unsigned char before[bounds::GUARD_BYTES];
    Scratch scratch;
    volatile unsigned char after[bounds::GUARD_BYTES];
};

// Writes the guard bytes; the whole group calls it before a call of the game, and check() after.
#if defined(TRACES_ACCESSES)
HD Scratch* begin(Memory* memory, void* frame = __builtin_frame_address(0)) {  // of the caller
#else
HD Scratch* begin(Memory* memory) {
#endif
    FOR_RANGE (k, bounds::GUARD_BYTES) {
        memory->before[k] = bounds::GUARD_BYTE;
        memory->after[k] = bounds::GUARD_BYTE;
    }
    group_sync();
#if defined(TRACES_ACCESSES)
    races::begin(frame);
#endif
    return &memory->scratch;
}

// Records the offset from Scratch of the nearest byte that has changed.
HD void check(const Memory* memory) {
    constexpr int SIZE = sizeof(Scratch), LAST = bounds::GUARD_BYTES - 1;
    group_sync();
    ONCE {
        int offset = 0;
        for (int k = LAST; k >= 0; --k) {
            if (memory->before[LAST - k] != bounds::GUARD_BYTE) offset = -1 - k;
            if (memory->after[k] != bounds::GUARD_BYTE) offset = SIZE + k;
        }
        if (offset != 0) bounds::write_record(bounds::SCRATCH_GUARDS, 0, offset, SIZE, -1);
    }
#if defined(TRACES_ACCESSES)
    races::end();
#endif
}

#endif

}  // namespace guarded_scratch
