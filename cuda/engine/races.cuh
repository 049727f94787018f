// SPDX-License-Identifier: Apache-2.0
// Debug builds of the host with guard bands: accesses that would race on a GPU. There a thread of the group executes
// each index of a loop; here one thread executes all, and a missing group_sync() has no effect. The compiler calls a
// function of this file at each access to memory (the instrumentation of -fsanitize=thread, without its library; where
// there is none, only misplaced constructs are found). Each index of a loop counts as a thread of its own, ONCE as
// thread 0, and code outside of loops as every thread. Two accesses race if different threads make them, without a
// group_sync() between them, and one of them writes. The first race of each environment and call is recorded.
#pragma once
#include "bounds.cuh"

extern "C" void* calloc(__SIZE_TYPE__, __SIZE_TYPE__);
extern "C" void free(void*);

#define UNTRACED __attribute__((noinline, no_sanitize("thread")))
#define UNTRACED_INLINE inline __attribute__((always_inline, no_sanitize("thread")))

namespace races {

constexpr i32 EVERY_THREAD = -1, ATOMIC = -2;  // beside the indices of loops

enum Race : i32 { READ_AFTER_WRITE, WRITE_AFTER_READ, WRITE_AFTER_WRITE, WRITTEN_BY_EVERY_THREAD };
enum Construct : i32 { OUTSIDE, IN_ONCE, IN_LOOP };

struct Access {
    i32 thread;
    u32 epoch;  // number of barriers before it
    u32 place;  // line, file and whether it is in a loop over the agents
};

// What one address was accessed by. Of readers two are enough: one of them is not the thread that writes next.
struct Cell {
    u64 address;
    Access write, read, other_read;
};

constexpr u64 FIRST_CAPACITY = 1 << 12, LAST_CAPACITY = 1 << 22;  // of the table; what finds no cell is not watched
constexpr u64 LARGEST_FRAME = 1 << 14;  // on some processors locals lie above the frame's address
constexpr int MAX_FILES = 256;

struct Tracker {
    bool enabled;
    Construct construct;
    Access now;
    u64 frame;  // the stack below it belongs to one thread
    Cell* cells;
    u64 capacity, used;  // of a hash table; `used` by the present epoch, those of earlier ones are empty
    const char* files[MAX_FILES];
    int num_files;
};

static thread_local Tracker own;

UNTRACED static u32 place_of(int line, const char* file, bool of_agents) {
    int k = 0;
    while (k < own.num_files && own.files[k] != file) ++k;
    if (k == own.num_files && k < MAX_FILES - 1) own.files[own.num_files++] = file;
    return (u32)line << 9 | (u32)k << 1 | (u32)of_agents;
}

UNTRACED static void begin_epoch() {
    ++own.now.epoch;
    own.used = 0;
    __asm__ volatile("" ::: "memory");
}

UNTRACED static void write_access(i64* items, Access access) {
    const char* file = own.files[access.place >> 1 & (MAX_FILES - 1)];
    items[0] = access.thread;
    items[1] = access.place >> 9;
    items[2] = file ? bounds::hash_of(file) : 0;
    items[3] = access.place & 1;
}

// Records what this thread has found first; the rest of the call is not watched.
UNTRACED static void write_record(int found, i64 kind, u64 address, Access before, Access access) {
    own.enabled = false;
    i64* items = bounds::record();
    if (items == nullptr || !bounds::is_first(items, found)) return;
    items[1] = kind;
    items[2] = (i64)address;
    write_access(items + 3, before);
    write_access(items + 7, access);
}

UNTRACED static bool found(Race kind, u64 address, Access before) {
    write_record(bounds::RACE, kind, address, before, own.now);
    return true;
}

UNTRACED_INLINE static Cell* find(Cell* cells, u64 capacity, u64 address, u32 epoch) {
    u64 k = address * 0x9e3779b97f4a7c15u >> 32;
    for (;; ++k) {
        Cell* cell = cells + (k & (capacity - 1));
        bool is_empty = cell->write.epoch != epoch && cell->read.epoch != epoch;
        if (is_empty || cell->address == address) return cell;
    }
}

// Twice as many cells, or false; they stay allocated, as the next launch needs as many.
UNTRACED static bool grow() {
    u64 capacity = own.capacity ? 2 * own.capacity : FIRST_CAPACITY;
    Cell* cells = capacity > LAST_CAPACITY ? nullptr : (Cell*)calloc(capacity, sizeof(Cell));
    if (cells == nullptr) return false;
    for (u64 k = 0; k < own.capacity; ++k) {
        Cell* cell = own.cells + k;
        if (cell->write.epoch == own.now.epoch || cell->read.epoch == own.now.epoch)
            *find(cells, capacity, cell->address, own.now.epoch) = *cell;
    }
    free(own.cells);
    own.cells = cells;
    own.capacity = capacity;
    return true;
}

// Finds a race of this access with an earlier one; false if there is none.
UNTRACED_INLINE static bool touch(Tracker& tracker, u64 address, bool writes) {
    if (2 * tracker.used >= tracker.capacity && !grow()) return false;
    const Access now = tracker.now;
    Cell* cell = find(tracker.cells, tracker.capacity, address, now.epoch);
    bool written = cell->write.epoch == now.epoch, read = cell->read.epoch == now.epoch;
    if (!written && !read) {
        ++tracker.used;
        cell->address = address;
    }
    if (written && cell->write.thread != now.thread)
        return found(writes ? WRITE_AFTER_WRITE : READ_AFTER_WRITE, address, cell->write);
    if (!writes) {
        if (!read)
            cell->read = now;
        else if (cell->read.thread != now.thread)
            cell->other_read = now;
        return false;
    }
    if (read && cell->read.thread != now.thread) return found(WRITE_AFTER_READ, address, cell->read);
    if (read && cell->other_read.epoch == now.epoch) return found(WRITE_AFTER_READ, address, cell->other_read);
    if (now.thread == EVERY_THREAD) return found(WRITTEN_BY_EVERY_THREAD, address, now);
    cell->write = now;
    return false;
}

// Items of more than four bytes are copies of several, unless they are 64-bit numbers.
UNTRACED_INLINE static void access(const void* pointer, u64 bytes, u64 stride, bool writes) {
    Tracker& tracker = own;
    if (!tracker.enabled) return;
    const u64 first = (u64)pointer, stack = (u64)__builtin_frame_address(0);
    if (first >= stack && first < tracker.frame) return;
    for (u64 k = 0; k < bytes; k += stride)
        if (touch(tracker, first + k, writes)) return;
}

// The group begins to run an environment, in the function with this frame.
UNTRACED static void begin(void* frame) {
    own.enabled = true;
    own.construct = OUTSIDE;
    own.frame = (u64)frame + LARGEST_FRAME;
    own.now.thread = EVERY_THREAD;
    own.now.place = 0;
    begin_epoch();
}

UNTRACED static void end() { own.enabled = false; }

// group_sync() and others that all threads must reach, and loops over the threads of the group.
UNTRACED static void require_all_threads(int line, const char* file) {
    if (!own.enabled || own.construct == OUTSIDE) return;
    Access inner = own.now;
    inner.place = place_of(line, file, false);
    write_record(bounds::MISPLACED, 0, 0, own.now, inner);
}

UNTRACED static void sync(int line, const char* file) {
    require_all_threads(line, file);
    begin_epoch();
}

// The next index of a loop begins: the compiler must read memory anew.
UNTRACED static bool enter(i32 thread) {
    own.now.thread = thread;
    __asm__ volatile("" ::: "memory");
    return true;
}

UNTRACED static int atomic_add(int* p, int n) {
    const i32 thread = own.now.thread;
    own.now.thread = ATOMIC;
    access(p, sizeof *p, sizeof *p, true);
    own.now.thread = thread;
    *p += n;
    return *p - n;
}

// A loop, or ONCE.
struct Scope {
    Construct outer;
    bool is_first = true;

    UNTRACED Scope(Construct construct, int line, const char* file, bool of_agents) : outer(own.construct) {
        if (construct == IN_LOOP || outer == IN_LOOP) require_all_threads(line, file);
        own.construct = construct;
        if (outer == OUTSIDE) own.now.place = place_of(line, file, of_agents);
        __asm__ volatile("" ::: "memory");
    }
    UNTRACED ~Scope() {
        own.construct = outer;
        if (outer == OUTSIDE) own.now.thread = EVERY_THREAD;
        __asm__ volatile("" ::: "memory");
    }
    UNTRACED bool once() {
        bool first = is_first;
        is_first = false;
        return first;
    }
};

template <class T>
struct Element {
    static constexpr i64 SIZE = 0;
};
template <class T, int N>
struct Element<T[N]> {
    static constexpr i64 SIZE = sizeof(T);
};
template <class T, int N>
struct Element<CheckedArray<T, N>> {
    static constexpr i64 SIZE = sizeof(T);
};

// Writes offset and size of a member of S, and the size of an element if it is an array.
template <class S, class BASE, class T>
HD void measure(i64* out, T BASE::* member) {
    constexpr i64 AT = 4096;
    const T* address = &(((S*)AT)->*member);
    out[0] = (i64)address - AT;
    out[1] = sizeof(T);
    out[2] = Element<T>::SIZE;
}

}  // namespace races

// What the compiler calls.
#define TRACED extern "C" __attribute__((visibility("hidden"))) UNTRACED
#define TRACED_ACCESS(bytes)                                                                                     \
    TRACED void __tsan_read##bytes(void* p) { races::access(p, bytes, bytes < 4 ? bytes : 4, false); }           \
    TRACED void __tsan_write##bytes(void* p) { races::access(p, bytes, bytes < 4 ? bytes : 4, true); }           \
    TRACED void __tsan_unaligned_read##bytes(void* p) { races::access(p, bytes, bytes < 4 ? bytes : 4, false); } \
    TRACED void __tsan_unaligned_write##bytes(void* p) { races::access(p, bytes, bytes < 4 ? bytes : 4, true); }
TRACED_ACCESS(1)
TRACED_ACCESS(2)
TRACED_ACCESS(4)
TRACED_ACCESS(8)
TRACED_ACCESS(16)
TRACED void __tsan_init() {}
TRACED void __tsan_func_entry(void*) {}
TRACED void __tsan_func_exit() {}
TRACED void __tsan_read_range(void* p, u64 bytes) { races::access(p, bytes, 1, false); }
TRACED void __tsan_write_range(void* p, u64 bytes) { races::access(p, bytes, 1, true); }
TRACED void* __tsan_memcpy(void* to, const void* from, u64 bytes) {
    races::access(from, bytes, 1, false);
    races::access(to, bytes, 1, true);
    return __builtin_memcpy(to, from, bytes);
}
TRACED void* __tsan_memmove(void* to, const void* from, u64 bytes) {
    races::access(from, bytes, 1, false);
    races::access(to, bytes, 1, true);
    return __builtin_memmove(to, from, bytes);
}
TRACED void* __tsan_memset(void* to, int value, u64 bytes) {
    races::access(to, bytes, 1, true);
    return __builtin_memset(to, value, bytes);
}
