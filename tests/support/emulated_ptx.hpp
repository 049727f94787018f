// PTX instructions for the emulation of CUDA: functions with the instructions' names, operands in the order of the PTX
// text, registers that are written by reference. Layouts of fragments are those of the PTX manual.
namespace emulation {
constexpr unsigned WARP = 0xffffffffu;
constexpr int MOST_COPIES = 256;
struct AsyncCopy {
    void* to;
    const void* from;
    int bytes;
    unsigned group;
};
// Copies take place only when they are waited for: the latest time that a GPU may take.
static struct {
    unsigned block, group;
    int count;
    AsyncCopy copies[MOST_COPIES];
} async_copies[MOST];

inline unsigned long long whole_warp() {
    require((threadIdx.x | 31) < blockDim.x, "an instruction of a whole warp runs in one that lacks threads");
    return key_of(WARP);
}
inline unsigned char* shared_at(unsigned offset, int alignment) {
    require(offset % alignment == 0, "an address in shared memory is not aligned");
    return shared_memory + (int)offset;
}
template <int A, int B>
struct Fragments {
    unsigned a[A], b[B];
};
inline float cut_off(double x) {
    float nearest = (float)x;
    return __builtin_fabs((double)nearest) > __builtin_fabs(x) ? __builtin_nextafterf(nearest, 0) : nearest;
}
// D = A B + C for A of 16 x K and B of K x 8. A register holds PER_REGISTER elements of neighbouring k; value(register,
// k) is one of them. Products are exact and their sum is cut off once, towards zero; tensor cores may cut off more.
template <int PER_REGISTER, int A, int B, class F>
inline void multiply(float* (&d)[4], const Fragments<A, B>& own, const float (&c)[4], F value) {
    struct Sums {
        float x[4];
    } sums = exchange(whole_warp(), own, [&] {
        Sums result;
        unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
        for (int i = 0; i < 4; ++i) {
            unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            double sum = c[i];
            for (unsigned k = 0; k < B * 4 * PER_REGISTER; ++k) {
                unsigned word = k / PER_REGISTER, a = row / 8 + word / 4 * 2, b = A + word / 4;
                sum += (double)value(exchanged[first + row % 8 * 4 + word % 4][a], k) *
                       value(exchanged[first + column * 4 + word % 4][b], k);
            }
            result.x[i] = cut_off(sum);
        }
        return result;
    });
    for (int i = 0; i < 4; ++i) *d[i] = sums.x[i];
}
inline float tf32(unsigned bits, unsigned) { return __uint_as_float(bits & ~0x1fffu); }
inline float bf16(unsigned bits, unsigned k) { return __uint_as_float(k % 2 ? bits & 0xffff0000u : bits << 16); }
inline unsigned to_bf16(float x) {
    unsigned b = __float_as_uint(x);
    return x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
// Lanes 8 j to 8 j + 7 have the addresses of the rows of matrix j, whose elements go to register j.
template <int N, bool TRANSPOSED>
inline void load_matrices(unsigned* (&registers)[N], unsigned address) {
    unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
    struct Words {
        unsigned x[N];
    } words = exchange(whole_warp(), address, [&] {
        Words result;
        for (int j = 0; j < N; ++j) {
            unsigned short pair[2];
            for (unsigned h = 0; h < 2; ++h) {
                unsigned row = TRANSPOSED ? lane % 4 * 2 + h : lane / 4,
                         column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + h;
                memcpy(&pair[h], shared_at(exchanged[first + 8 * j + row][0], 16) + 2 * column, 2);
            }
            result.x[j] = pair[0] | (unsigned)pair[1] << 16;
        }
        return result;
    });
    for (int j = 0; j < N; ++j) *registers[j] = words.x[j];
}
// The thread's copies of this block.
inline auto& own_copies() {
    auto& own = async_copies[threadIdx.x];
    if (own.block != blocks_run) own.block = blocks_run, own.count = 0;
    return own;
}
inline void copy_later(unsigned to, const void* from, int bytes) {
    auto& own = own_copies();
    require((size_t)from % bytes == 0, "cp.async reads from an address that is not aligned");
    require(own.count < MOST_COPIES, "more copies are in flight than the emulation holds");
    own.copies[own.count++] = {shared_at(to, bytes), from, bytes, own.group};
}
// Does the copies of the groups before `end`.
inline void complete_copies(unsigned end) {
    auto& own = own_copies();
    int left = 0;
    for (int k = 0; k < own.count; ++k) {
        AsyncCopy copy = own.copies[k];
        if ((int)(copy.group - end) < 0) {
            memcpy(copy.to, copy.from, copy.bytes);
        } else {
            own.copies[left++] = copy;
        }
    }
    own.count = left;
}
}  // namespace emulation

namespace ptx {
// Operands that are read, by the letter of their constraint: other types are an error, as in nvcc.
inline unsigned r(unsigned x) { return x; }
inline unsigned r(int x) { return (unsigned)x; }
inline float f(float x) { return x; }
inline const void* l(const void* x) { return x; }
inline const void* l(unsigned long x) { return (const void*)x; }
inline const void* l(unsigned long long x) { return (const void*)x; }
inline const void* l(long long x) { return (const void*)x; }
inline int n(int x) { return x; }
template <class T>
void r(T) = delete;
template <class T>
void f(T) = delete;

inline void mma_sync_aligned_m16n8k4_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                               unsigned a1, unsigned b0, float c0, float c1, float c2,
                                                               float c3) {
    float* d[] = {&d0, &d1, &d2, &d3};
    emulation::multiply<1, 2, 1>(d, {{a0, a1}, {b0}}, {c0, c1, c2, c3}, emulation::tf32);
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                               unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                               unsigned b1, float c0, float c1, float c2, float c3) {
    float* d[] = {&d0, &d1, &d2, &d3};
    emulation::multiply<1, 4, 2>(d, {{a0, a1, a2, a3}, {b0, b1}}, {c0, c1, c2, c3}, emulation::tf32);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1, float c0, float c1, float c2, float c3) {
    float* d[] = {&d0, &d1, &d2, &d3};
    emulation::multiply<2, 4, 2>(d, {{a0, a1, a2, a3}, {b0, b1}}, {c0, c1, c2, c3}, emulation::bf16);
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned& r0, unsigned& r1, unsigned address) {
    unsigned* registers[] = {&r0, &r1};
    emulation::load_matrices<2, false>(registers, address);
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned& r0, unsigned& r1, unsigned address) {
    unsigned* registers[] = {&r0, &r1};
    emulation::load_matrices<2, true>(registers, address);
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3,
                                                     unsigned address) {
    unsigned* registers[] = {&r0, &r1, &r2, &r3};
    emulation::load_matrices<4, false>(registers, address);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3,
                                                           unsigned address) {
    unsigned* registers[] = {&r0, &r1, &r2, &r3};
    emulation::load_matrices<4, true>(registers, address);
}
inline void cvt_rna_tf32_f32(unsigned& to, float x) {
    unsigned b = __float_as_uint(x);
    to = (b >> 23 & 255) == 255 ? b : (b + 0x1000) & ~0x1fffu;
}
inline void cvt_rn_bf16x2_f32(unsigned& to, float upper, float lower) {
    to = emulation::to_bf16(upper) << 16 | emulation::to_bf16(lower);
}
inline void tanh_approx_f32(float& to, float x) { to = __builtin_tanhf(x); }
inline void rcp_approx_ftz_f32(float& to, float x) { to = 1.0f / x; }
inline void ex2_approx_ftz_f32(float& to, float x) {
    float y = __builtin_exp2f(x);
    to = y < 0x1p-126f ? 0.0f : y;
}
inline void cp_async_ca_shared_global(unsigned to, const void* from, int bytes) {
    emulation::require(bytes == 4 || bytes == 8 || bytes == 16, "cp.async.ca copies 4, 8 or 16 bytes");
    emulation::copy_later(to, from, bytes);
}
inline void cp_async_cg_shared_global(unsigned to, const void* from, int bytes) {
    emulation::require(bytes == 16, "cp.async.cg copies 16 bytes");
    emulation::copy_later(to, from, bytes);
}
inline void prefetch_global_L2(const void*) {}
inline void cp_async_commit_group() { ++emulation::own_copies().group; }
inline void cp_async_wait_group(int pending) {
    emulation::complete_copies(emulation::own_copies().group - (unsigned)pending);
}
inline void cp_async_wait_all() { emulation::complete_copies(emulation::own_copies().group + 1); }
// Barriers with a number: of the next so many threads as this one is in a row of.
inline void barrier_sync(unsigned barrier, int threads) {
    emulation::wait(emulation::key_of_barrier(barrier, threads));
}
inline void bar_sync(unsigned barrier, int threads) { barrier_sync(barrier, threads); }
inline void setp_ne_u32_barrier_red_or_pred_selp_u32(unsigned& any, unsigned own, unsigned barrier, int threads) {
    any = emulation::any(emulation::key_of_barrier(barrier, threads), own != 0);
}
}  // namespace ptx
