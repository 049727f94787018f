// SPDX-License-Identifier: Apache-2.0
// Vectorised stepping on the host. A small single-agent game is stepped SIMD_ENVS environments at a time: their states
// are copied into arrays over environments, and step() and observe() are called in a loop over those arrays that the
// compiler turns into vector instructions. Rare cases would keep the loop from being vectorised: environments that
// begin or end an episode, have a fault or met needs_scalar_path() are left to step_env() of step.cuh, one by one.
#pragma once
#include "action_source.cuh"

namespace host_simd {

#if defined(__CUDACC__)

struct EnvRange {
    template <class... A>
    HD EnvRange(const A&...) {}
    HD bool has_stepped(i64, Io) const { return false; }
};
#define FOR_REMAINING_ENVS(env, n, range) FOR_ENVS (env, n)

#else

#if defined(DEBUG_THREAD_ORDER)
constexpr bool DEFAULT_ORDER = false;
#else
constexpr bool DEFAULT_ORDER = true;
#endif
constexpr int MAX_ITEMS = 32;  // of state and of an observation: with more, the copies cost more than vectors gain

// The inputs and outputs of a batch of environments: local arrays of fixed length, which GCC and Clang vectorise loops
// over. Flags are integers of the width of the floats beside them.
struct Batch {
    SimdState state;
    alignas(64) Action action[ACTION_HEADS][SIMD_ENVS];
    alignas(64) Observation obs[OBS_SIZE][SIMD_ENVS];
    alignas(64) float reward[SIMD_ENVS];
    alignas(64) i32 elapsed_steps[SIMD_ENVS], eligible[SIMD_ENVS];
    alignas(64) i32 terminated[SIMD_ENVS], truncated[SIMD_ENVS], needed_scalar[SIMD_ENVS];
    alignas(64) u32 key0[SIMD_ENVS], key1[SIMD_ENVS], episode[SIMD_ENVS];  // optimised away where step() draws nothing
};

HD u64 mask_of(const i32 (&flags)[SIMD_ENVS]) {
    u64 mask = 0;
    for (int k = 0; k < SIMD_ENVS; ++k) mask |= (u64)(u32)flags[k] << k;
    return mask;
}

template <class T, int N>
HD void gather(T (&own)[N], const T (&simd)[N][SIMD_ENVS], int k) {
    for (int j = 0; j < N; ++j) own[j] = simd[j][k];
}

template <class T, int N>
HD void scatter(const T (&own)[N], T (&simd)[N][SIMD_ENVS], int k) {
    for (int j = 0; j < N; ++j) simd[j][k] = own[j];
}

// The environments of one worker thread. next() steps them batch by batch and yields those that step_env() must handle.
class EnvRange {
  public:
    static constexpr bool SUPPORTED = staging::IN_REGISTERS && STATE_ITEMS <= MAX_ITEMS && OBS_SIZE <= MAX_ITEMS &&
                                      DEFAULT_ORDER && !END_ON_NONFINITE && !ACTION_MASKS && !TRACKS_ACTING &&
                                      !OBS_PADDED && __is_empty(Scratch);

    EnvRange(EngineState m, State s, stepping::ActionSource source, StepOutputs out)
        : m(m), s(s), source(source), out(out) {}

    i64 begin(i64 start, i64 stop) {
        first = start;
        end = stop;
        return start - 1;
    }

    // The next environment for step_env(); false after the last.
    bool next(i64& env) {
        if constexpr (!SUPPORTED) return ++env < end;
        while ((unstepped | ended) == 0) {
            first += size;
            if (first >= end) return false;
            size = end - first < SIMD_ENVS ? (int)(end - first) : SIMD_ENVS;
            step_batch();
        }
        u64& rest = unstepped != 0 ? unstepped : ended;  // one kind after the other: branches are predicted better
        env = first + __builtin_ctzll(rest);
        rest &= rest - 1;
        return true;
    }

    // Whether the batch has called the game's step() for this environment; writes its results to `io` then.
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
    __attribute__((flatten, noinline)) void step_batch() {
        Batch batch;
        stepped = ended = 0;
        unstepped = ~0ull >> (64 - size);
        load(batch);
        find_eligible(batch);
        const u64 eligible = mask_of(batch.eligible);
        if (__builtin_popcountll(eligible) < SIMD_ENVS / 4) return;  // one by one is faster
        fill_ineligible(batch, eligible);
        step_and_observe(batch);
        store(batch);
    }

    HD void load(Batch& batch) const {
        const int n = size;
        EnvState unused;
        each_field(batch.state, unused, s, [&](auto& simd, auto& own, auto* global) {
            constexpr int N = sizeof own / sizeof *own;
            for (int k = 0; k < n; ++k)
                for (int j = 0; j < N; ++j) simd[j][k] = global[(first + k) * N + j];
        });
        for (int k = 0; k < n; ++k) batch.elapsed_steps[k] = m.elapsed_steps[first + k] + 1;
        for (int k = 0; k < n; ++k) {
            batch.key0[k] = (u32)m.key[2 * (first + k)];
            batch.key1[k] = (u32)m.key[2 * (first + k) + 1];
            batch.episode[k] = (u32)m.episode[first + k];
        }
    }

    // Loads the actions. Environments are eligible whose agent is active and has a valid action.
    HD void find_eligible(Batch& batch) const {
        const int n = size;
        for (int k = 0; k < n; ++k) batch.eligible[k] = ((const u8*)m.active)[first + k];
        for (int k = n; k < SIMD_ENVS; ++k) batch.eligible[k] = 0;
        for (int k = 0; k < n; ++k) {
            for (int j = 0; j < ACTION_HEADS; ++j) {
                i64 at = (first + k) * ACTION_HEADS + j;
                if (source.int64_actions) {
                    LongAction a = ((const LongAction*)source.actions)[at];
                    batch.action[j][k] = (Action)a;
                    batch.eligible[k] = batch.action[j][k] == a ? batch.eligible[k] : 0;
                } else {
                    batch.action[j][k] = ((const Action*)source.actions)[at];
                }
            }
        }
        bool active = true;
        EngineState engine = {};
        engine.active = &active;
        for (int k = 0; k < n; ++k) {
            Action action[ACTION_HEADS];
            gather(action, batch.action, k);
            Io io = {};
            io.actions = action;
            batch.eligible[k] = check_actions(engine, io) == 0 ? batch.eligible[k] : 0;
        }
    }

    // The loop steps all of the batch: the others become copies of an eligible environment, so that the game never sees
    // an invalid action or a state that it need not step.
    HD void fill_ineligible(Batch& batch, u64 eligible) const {
        EnvState unused;
        const int model = __builtin_ctzll(eligible);
        for (u64 rest = ~eligible; rest != 0; rest &= rest - 1) {
            int k = __builtin_ctzll(rest);
            each_field(batch.state, unused, s, [&](auto& simd, auto&, auto*) {
                for (auto& item : simd) item[k] = item[model];
            });
            for (auto& item : batch.action) item[k] = item[model];
            batch.elapsed_steps[k] = batch.elapsed_steps[model];
            batch.key0[k] = batch.key0[model];
            batch.key1[k] = batch.key1[model];
            batch.episode[k] = batch.episode[model];
        }
    }

    // What step() and observe() access is scalar and local to an iteration: only then is the loop vectorised.
    HD void step_and_observe(Batch& batch) const {
        const bool active = true;
        in_simd_loop = true;
        for (int k = 0; k < SIMD_ENVS; ++k) {
            EnvState own;
            Action action[ACTION_HEADS];
            Observation row[1][OBS_SIZE];
            float reward = 0;
            bool terminated = false, truncated = false;
            each_field(batch.state, own, s, [&](auto& simd, auto& own, auto*) { gather(own, simd, k); });
            gather(action, batch.action, k);
            Io io = {};
            io.elapsed_steps = batch.elapsed_steps[k];
            io.rng = {batch.key0[k], batch.key1[k], STEP_STREAM, batch.episode[k], (u32)io.elapsed_steps};
            io.active = &active;
            io.rewards = &reward;
            io.terminations = &terminated;
            io.truncations = &truncated;
            io.actions = action;
            io.obs = row;
            needs_scalar = 0;
            randomized::use(state_of(own, s));
            step(state_of(own, s), io);
            observe(state_of(own, s), io);
            each_field(batch.state, own, s, [&](auto& simd, auto& own, auto*) { scatter(own, simd, k); });
            scatter(row[0], batch.obs, k);
            batch.reward[k] = reward;
            batch.terminated[k] = terminated ? 1 : 0;
            batch.truncated[k] = truncated ? 1 : 0;
            batch.needed_scalar[k] = (i32)needs_scalar;
        }
        in_simd_loop = false;
    }

    // Stores what needs no scalar path. Where the episode ended, step_env() updates the engine's state and the outputs.
    HD void store(Batch& batch) {
        const int n = size;  // a local, which no store can change: so the loops are vectorised
        EnvState unused;
        alignas(64) i32 is_stepped[SIMD_ENVS], stays_active[SIMD_ENVS];
        for (int k = 0; k < SIMD_ENVS; ++k) {
            is_stepped[k] = batch.eligible[k] & ~batch.needed_scalar[k];
            stays_active[k] = is_stepped[k] & ~batch.terminated[k] & ~batch.truncated[k];
        }
        each_field(batch.state, unused, s, [&](auto& simd, auto& own, auto* global) {
            constexpr int N = sizeof own / sizeof *own;
            for (int k = 0; k < n; ++k) {
                for (int j = 0; j < N; ++j) {
                    auto& item = global[(first + k) * N + j];
                    item = is_stepped[k] ? simd[j][k] : item;
                }
            }
        });
        for (int k = 0; k < n; ++k) {
            i32& elapsed_steps = m.elapsed_steps[first + k];
            elapsed_steps = stays_active[k] ? batch.elapsed_steps[k] : elapsed_steps;
        }
        for (int k = 0; k < n; ++k) {
            double sum = m.returns[first + k];
            m.returns[first + k] = stays_active[k] ? sum + batch.reward[k] : sum;
        }
        for (int k = 0; k < n; ++k)
            for (int j = 0; j < OBS_SIZE; ++j) out.obs[(first + k) * OBS_SIZE + j] = batch.obs[j][k];
        for (int k = 0; k < n; ++k) out.rewards[first + k] = batch.reward[k];
        for (int k = 0; k < n; ++k) {
            out.terminations[first + k] = out.truncations[first + k] = out.final_mask[first + k] = false;
            out.fault[first + k] = false;
            out.active[first + k] = true;
        }
        for (int k = 0; k < SIMD_ENVS; ++k) {
            rewards[k] = batch.reward[k];
            terminations[k] = batch.terminated[k];
            truncations[k] = batch.truncated[k];
        }
        stepped = mask_of(is_stepped);
        ended = stepped & ~mask_of(stays_active);
        unstepped &= ~stepped;
    }

    const EngineState m;  // of environment 0, like all pointers here
    const State s;
    const stepping::ActionSource source;
    const StepOutputs out;
    i64 first = 0, end = 0;  // first environment of the batch, end of the range
    int size = 0;            // environments of the batch
    // One bit per environment of the batch.
    u64 stepped = 0;    // the batch has called step()
    u64 ended = 0;      // of these: the episode ended, step_env() finishes the step
    u64 unstepped = 0;  // step_env() does the whole step
    i32 terminations[SIMD_ENVS], truncations[SIMD_ENVS];
    float rewards[SIMD_ENVS];
};
#define FOR_REMAINING_ENVS(env, n, range) \
    for (i64 env = range.begin((i64)(n) * worker_ / workers_, (i64)(n) * (worker_ + 1) / workers_); range.next(env);)

#endif

}  // namespace host_simd
