// SPDX-License-Identifier: Apache-2.0
// Replicas in lockstep. On the host a small game of one agent is stepped SIMD_ENVS environments at a time: their states
// are copied into arrays terminated_now the environments, and the game's functions run in loops terminated_now those,
// which the compiler turns into vector instructions where it can. A loop of vectors has no room for what few
// environments need. Those that begin or end an episode, have a fault, or met a needs_scalar_path() case are left to
// the step of step.cuh, which takes them one by one.
#pragma once
#include "action_source.cuh"

namespace host_simd {

#if defined(__CUDACC__)

struct EnvRange {
    template <class... A>
    HD EnvRange(const A&...) {}
    HD bool has_stepped(i64, Io) const { return false; }
};
#define FOR_REMAINING_ENVS(env, n, run) FOR_ENVS (env, n)

#else

#if defined(DEBUG_THREAD_ORDER)
constexpr bool DEFAULT_ORDER =
    false;  // a debug build changes the order in which environments and lanes come: one by one
#else
constexpr bool DEFAULT_ORDER = true;
#endif
constexpr int MAX_ITEMS = 32;  // of state, and of an observation: more would cost too much where no vectors come of it

// A worker's environments: steps them, and names those that are left to do.
class EnvRange {
  public:
    static constexpr bool SUPPORTED = staging::IN_REGISTERS && STATE_ITEMS <= MAX_ITEMS && OBS_SIZE <= MAX_ITEMS &&
                                      DEFAULT_ORDER && !END_ON_NONFINITE && !ACTION_MASKS && !OBS_PADDED &&
                                      __is_empty(Scratch);

    EnvRange(EngineState m, State s, stepping::ActionSource source, StepOutputs out)
        : m(m), s(s), actions(source.actions), int64_actions(source.int64_actions), out(out) {}

    i64 begin(i64 start, i64 stop) {
        first = start;
        end = stop;
        return start - 1;
    }

    // The next replica that is left to do; false after the last.
    bool next(i64& env) {
        if constexpr (!SUPPORTED) return ++env < end;
        while ((scalar_steps | ended) == 0) {
            first += size;
            if (first >= end) return false;
            size = end - first < SIMD_ENVS ? (int)(end - first) : SIMD_ENVS;
            scalar_steps = ~0ull >> (64 - size);
            stepped = 0;
            step_together();
        }
        // Those that begin apart from those that end: the processor foresees their branches.
        u64& left = scalar_steps != 0 ? scalar_steps : ended;
        env = first + __builtin_ctzll(left);
        left &= left - 1;
        return true;
    }

    // Whether the game's own step of an environment has been made here; what it gave is in `io` then.
    bool has_stepped(i64 env, Io io) const {
        if constexpr (!SUPPORTED) return false;
        i64 k = env - first;
        if ((stepped >> k & 1) == 0) return false;
        io.rewards[0] = rewards[k];
        io.terminations[0] = terminations[k];
        io.truncations[0] = truncations[k];
        return true;
    }

  private:
    static u64 mask_of(const i32 (&flags)[SIMD_ENVS]) {
        u64 mask = 0;
        for (int k = 0; k < SIMD_ENVS; ++k) mask |= (u64)(u32)flags[k] << k;
        return mask;
    }

    template <class T, int N>
    static void gather_lane(T (&own)[N], const T (&lanes)[N][SIMD_ENVS], int k) {
        for (int j = 0; j < N; ++j) own[j] = lanes[j][k];
    }
    template <class T, int N>
    static void scatter_lane(const T (&own)[N], T (&lanes)[N][SIMD_ENVS], int k) {
        for (int j = 0; j < N; ++j) lanes[j][k] = own[j];
    }

    // GCC and Clang find vectors in loops terminated_now local arrays, of a fixed length, with all that is called
    // inside; and where what a lane works on, its flags above all, is scalar until its end, when each becomes an
    // integer.
    __attribute__((flatten, noinline)) void step_together() {
        const int n = size;
        SimdState lanes;
        EnvState unused;
        alignas(64) Action action[ACTION_HEADS][SIMD_ENVS];
        alignas(64) Observation obs[OBS_SIZE][SIMD_ENVS];
        alignas(64) float reward[SIMD_ENVS];
        alignas(64) i32 time[SIMD_ENVS], is_eligible[SIMD_ENVS], terminated[SIMD_ENVS], truncated[SIMD_ENVS],
            needed_scalar[SIMD_ENVS];
        alignas(64) u32 key0[SIMD_ENVS], key1[SIMD_ENVS],
            episode[SIMD_ENVS];  // dropped by the compiler where nothing is drawn

        each_field(lanes, unused, s, [&](auto& simd, auto& own, auto* global) {
            constexpr int N = sizeof own / sizeof *own;
            for (int k = 0; k < n; ++k)
                for (int j = 0; j < N; ++j) simd[j][k] = global[(first + k) * N + j];
        });
        for (int k = 0; k < n; ++k) time[k] = m.elapsed_steps[first + k] + 1;
        for (int k = 0; k < n; ++k) {
            key0[k] = (u32)m.key[2 * (first + k)];
            key1[k] = (u32)m.key[2 * (first + k) + 1];
            episode[k] = (u32)m.episode[first + k];
        }
        for (int k = 0; k < n; ++k) is_eligible[k] = ((const u8*)m.active)[first + k];
        for (int k = n; k < SIMD_ENVS; ++k) is_eligible[k] = 0;
        for (int k = 0; k < n; ++k)
            for (int j = 0; j < ACTION_HEADS; ++j) {
                i64 at = (first + k) * ACTION_HEADS + j;
                if (int64_actions) {
                    LongAction a = ((const LongAction*)actions)[at];
                    action[j][k] = (Action)a;
                    is_eligible[k] = action[j][k] == a ? is_eligible[k] : 0;
                } else {
                    action[j][k] = ((const Action*)actions)[at];
                }
            }
        bool active = true;
        EngineState ready_engine = {};
        ready_engine.active = &active;
        for (int k = 0; k < n; ++k) {
            Action own_action[ACTION_HEADS];
            gather_lane(own_action, action, k);
            Io io = {};
            io.actions = own_action;
            is_eligible[k] = check_actions(ready_engine, io) == 0 ? is_eligible[k] : 0;
        }

        // The other lanes are copies of one that is ready: no step is made that would not be made anyhow.
        const u64 ready = mask_of(is_eligible);
        if (__builtin_popcountll(ready) < SIMD_ENVS / 4) return;  // then it takes longer than one by one
        const int model = __builtin_ctzll(ready);
        for (u64 rest = ~ready; rest != 0; rest &= rest - 1) {
            int k = __builtin_ctzll(rest);
            each_field(lanes, unused, s, [&](auto& simd, auto&, auto*) {
                for (auto& item : simd) item[k] = item[model];
            });
            for (auto& item : action) item[k] = item[model];
            time[k] = time[model];
            key0[k] = key0[model];
            key1[k] = key1[model];
            episode[k] = episode[model];
        }

        in_simd_loop = true;
        for (int k = 0; k < SIMD_ENVS; ++k) {
            EnvState own;
            Action own_action[ACTION_HEADS];
            float r = 0;
            bool terminated_now = false, truncated_now = false;
            each_field(lanes, own, s, [&](auto& simd, auto& own, auto*) { gather_lane(own, simd, k); });
            gather_lane(own_action, action, k);
            Io io = {};
            io.rng = {key0[k], key1[k], STEP_STREAM, episode[k], (u32)time[k]};
            io.elapsed_steps = time[k];
            io.active = &active;
            io.rewards = &r;
            io.terminations = &terminated_now;
            io.truncations = &truncated_now;
            io.actions = own_action;
            needs_scalar = 0;
            step(state_of(own, s), io);
            each_field(lanes, own, s, [&](auto& simd, auto& own, auto*) { scatter_lane(own, simd, k); });
            reward[k] = r;
            terminated[k] = terminated_now ? 1 : 0;
            truncated[k] = truncated_now ? 1 : 0;
            needed_scalar[k] = (i32)needs_scalar;
        }
        for (int k = 0; k < SIMD_ENVS; ++k) {
            EnvState own;
            Action own_action[ACTION_HEADS];
            float r = reward[k];
            bool terminated_now = terminated[k] != 0, truncated_now = truncated[k] != 0;
            Observation row[1][OBS_SIZE];
            each_field(lanes, own, s, [&](auto& simd, auto& own, auto*) { gather_lane(own, simd, k); });
            gather_lane(own_action, action, k);
            Io io = {};
            io.rng = {key0[k], key1[k], STEP_STREAM, episode[k], (u32)time[k]};
            io.elapsed_steps = time[k];
            io.active = &active;
            io.rewards = &r;
            io.terminations = &terminated_now;
            io.truncations = &truncated_now;
            io.actions = own_action;
            io.obs = row;
            needs_scalar = 0;
            observe(state_of(own, s), io);
            scatter_lane(row[0], obs, k);
            needed_scalar[k] |= (i32)needs_scalar;
        }
        in_simd_loop = false;

        alignas(64) i32 is_stepped[SIMD_ENVS], stays_active[SIMD_ENVS];
        for (int k = 0; k < SIMD_ENVS; ++k) {
            is_stepped[k] = is_eligible[k] & ~needed_scalar[k];
            stays_active[k] = is_stepped[k] & ~terminated[k] & ~truncated[k];
        }
        each_field(lanes, unused, s, [&](auto& simd, auto& own, auto* global) {
            constexpr int N = sizeof own / sizeof *own;
            for (int k = 0; k < n; ++k)
                for (int j = 0; j < N; ++j) {
                    auto& item = global[(first + k) * N + j];
                    item = is_stepped[k] ? simd[j][k] : item;
                }
        });
        for (int k = 0; k < n; ++k) m.elapsed_steps[first + k] = stays_active[k] ? time[k] : m.elapsed_steps[first + k];
        for (int k = 0; k < n; ++k) {
            float sum = m.returns[first + k];
            m.returns[first + k] = stays_active[k] ? sum + reward[k] : sum;
        }
        for (int k = 0; k < n; ++k)
            for (int j = 0; j < OBS_SIZE; ++j) out.obs[(first + k) * OBS_SIZE + j] = obs[j][k];
        for (int k = 0; k < n; ++k) out.rewards[first + k] = reward[k];
        for (int k = 0; k < n; ++k) {
            out.terminations[first + k] = out.truncations[first + k] = out.final_mask[first + k] = false;
            out.active[first + k] = true;
        }
        for (int k = 0; k < SIMD_ENVS; ++k) {
            rewards[k] = reward[k];
            terminations[k] = terminated[k];
            truncations[k] = truncated[k];
        }
        stepped = mask_of(is_stepped);
        ended = stepped & ~mask_of(stays_active);
        scalar_steps &= ~stepped;
    }

    const EngineState m;
    const State s;
    const void* const actions;
    const i32 int64_actions;
    const StepOutputs out;
    i64 first = 0, end = 0;  // of what is being done; of all
    int size = 0;            // how many are being done, the k-th of them being the k-th bit of a word
    u64 stepped = 0;         // here
    u64 ended = 0;           // of these, those left to do
    u64 scalar_steps = 0;    // left to do, their step too
    i32 terminations[SIMD_ENVS], truncations[SIMD_ENVS];
    float rewards[SIMD_ENVS];
};
#define FOR_REMAINING_ENVS(env, n, run) \
    for (i64 env = run.begin((i64)(n) * worker_ / workers_, (i64)(n) * (worker_ + 1) / workers_); run.next(env);)

#endif

}  // namespace host_simd
