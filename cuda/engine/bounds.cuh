// SPDX-License-Identifier: Apache-2.0
// Debug builds with guard bands: arrays of the state, of Io and of games whose indices are checked. An index out of
// bounds is recorded, the first of each environment and call, and the access goes to memory that nothing else uses. The
// generated header before it says which arrays there are and DUMMY_BYTES, the largest item of one.
#pragma once
#include "kernel.cuh"

namespace bounds {

// 32-bit FNV-1a, by which the host finds the name of a file: device code cannot return a string.
HD constexpr u32 hash_of(const char* name) {
    u32 hash = 2166136261u;
    while (*name) hash = (hash ^ (unsigned char)*name++) * 16777619u;
    return hash;
}

// An index, and the line where it stands.
struct Index {
    i64 value;
    i64 line;
    u32 file;
    template <class I>
    HD Index(I index, int at_line = __builtin_LINE(), const char* in_file = __builtin_FILE())
        : value((i64)index), line(at_line), file(hash_of(in_file)) {}
};

// Of one environment: Array + 1 or 0, axis, index, index of the first axis, size of the axis, line, file; races.cuh has
// other items behind the first. engine/guards.py reads it.
constexpr int RECORD_ITEMS = 11;

#if defined(__CUDACC__)
HD i64*& record() {
    __shared__ i64* records[ENVS_PER_BLOCK];
    return records[(int)threadIdx.x / THREADS_PER_ENV];
}
__device__ __align__(16) unsigned char dummy_memory[DUMMY_BYTES];
HD bool is_first(i64* record, i64 array) {
    return atomicCAS((unsigned long long*)record, 0ull, (unsigned long long)array + 1) == 0;
}
#else
static thread_local i64* own_record;
alignas(16) static thread_local unsigned char dummy_memory[DUMMY_BYTES];
HD i64*& record() { return own_record; }
HD bool is_first(i64* record, i64 array) {
    bool first = record[0] == 0;
    if (first) record[0] = array + 1;
    return first;
}
#endif

// The records of this environment get what its group of threads finds from now on.
template <class Arguments>
HD void use(const Arguments& args, i64 env) {
    record() = args.violations + env * RECORD_ITEMS;
}

HD void write_record(int array, int axis, Index k, i64 n, i64 first) {
    i64* own = record();
    if (!is_first(own, array)) return;
    own[1] = axis;
    own[2] = k.value;
    own[3] = first;
    own[4] = n;
    own[5] = k.line;
    own[6] = k.file;
}

HD bool is_inside(int array, int axis, Index k, i64 n, i64 first) {
    bool inside = k.value >= 0 && k.value < n;
    if (!inside) write_record(array, axis, k, n, first);
    return inside;
}

// An index of an action, 0 if it is out of bounds.
HD int checked(int array, int axis, Index k, i64 n, i64 first) {
    return is_inside(array, axis, k, n, first) ? (int)k.value : 0;
}

template <class T, int... N>
struct Nested {
    typedef T Type;
};
template <class T, int N, int... REST>
struct Nested<T, N, REST...> {
    typedef typename Nested<T, REST...>::Type Type[N];
};

// A pointer to N items, T[REST]…, of axis AXIS of an array.
template <class T, int ARRAY, int AXIS, int N, int... REST>
struct Checked {
    typedef typename Nested<T, REST...>::Type Item;
    Item* data = nullptr;
    i64 first = -1;  // index of the first axis

    HD Checked() {}
    HD Checked(Item* items, i64 first_index = -1) : data(items), first(first_index) {}
    HD decltype(auto) operator[](Index k) const {
        Item* item = is_inside(ARRAY, AXIS, k, N, first) ? data + k.value : (Item*)dummy_memory;
        if constexpr (sizeof...(REST) == 0)
            return (*item);
        else
            return Checked<T, ARRAY, AXIS + 1, REST...>(*item, AXIS == 0 ? k.value : first);
    }
    HD Item& operator*() const { return *data; }
    HD Item* operator+(i64 k) const { return data + k; }
    HD Item* begin() const { return data; }
    HD Item* end() const { return data + N; }
    template <class U>
    HD operator U*() const {  // a template, so that the compiler's own operator[] is no candidate
        return (U*)data;
    }
};

// An array of a game, in Scratch for example, that checks its indices.
template <class T, int N>
struct CheckedArray {
    T items[N + 1];  // the last one is what an index out of bounds accesses

    HD T& operator[](Index k) { return items[is_inside(CHECKED_ARRAY, 0, k, N, -1) ? k.value : N]; }
    HD const T& operator[](Index k) const { return items[is_inside(CHECKED_ARRAY, 0, k, N, -1) ? k.value : N]; }
    HD T& operator*() { return *items; }
    HD T* operator+(i64 k) { return items + k; }
    HD T* begin() { return items; }
    HD T* end() { return items + N; }
    template <class U>
    HD operator U*() {  // as in Checked
        return (U*)items;
    }
};

}  // namespace bounds

using bounds::CheckedArray;
