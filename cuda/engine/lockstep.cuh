// SPDX-License-Identifier: Apache-2.0
// Replicas in lockstep. On the host a small game of one agent is stepped LANES replicas at a time: their states are
// copied into arrays over the replicas, and the game's functions run in loops over those, which the compiler turns into
// vector instructions where it can. A loop of vectors has no room for what few replicas need. Those that begin or end
// an episode, have a fault, or met a rare() case are left to the tick of machine.cuh, which takes them one by one.
#pragma once
#include "outputs.cuh"
#include "staging.cuh"

// Where a tick writes: the rows of replica 0, with those of the others behind them.
struct Outputs {
    Observation* obs;
    float* rewards;
    bool *terminations, *truncations, *active, *final_mask;
};

namespace lockstep {

#if defined(__CUDACC__)

struct Run {
    template <class... A>
    HD Run(const A&...) {}
    HD bool has_stepped(i64, Io) const { return false; }
};
#define FOR_REPLICAS_LEFT(e, n, run) FOR_REPLICAS(e, n)

#else

#if defined(LANE_ORDER)
constexpr bool IN_ORDER = false;  // a debug build changes the order in which replicas and lanes come: one by one
#else
constexpr bool IN_ORDER = true;
#endif
constexpr int MOST_ITEMS = 32;  // of state, and of an observation: more would cost too much where no vectors come of it

// A worker's replicas: steps them, and names those that are left to do.
class Run {
  public:
    static constexpr bool POSSIBLE = staging::IN_REGISTERS && STATE_ITEMS <= MOST_ITEMS && OBS_SIZE <= MOST_ITEMS &&
                                     IN_ORDER && !QUARANTINE && !ACTION_MASKS && !OBS_PADDED && __is_empty(Scratch);

    Run(Machine m, State s, const void* actions, i32 wide, Outputs out)
        : m(m), s(s), actions(actions), wide(wide), out(out) {}

    i64 begin(i64 start, i64 stop) {
        first = start;
        end = stop;
        return start - 1;
    }

    // The next replica that is left to do; false after the last.
    bool next(i64& e) {
        if constexpr (!POSSIBLE) return ++e < end;
        while ((others | ended) == 0) {
            first += size;
            if (first >= end) return false;
            size = end - first < LANES ? (int)(end - first) : LANES;
            others = ~0ull >> (64 - size);
            stepped = 0;
            tick();
        }
        // Those that begin apart from those that end: the processor foresees their branches.
        u64& left = others != 0 ? others : ended;
        e = first + __builtin_ctzll(left);
        left &= left - 1;
        return true;
    }

    // Whether the game's own step of a replica has been made here; what it gave is in `io` then.
    bool has_stepped(i64 e, Io io) const {
        if constexpr (!POSSIBLE) return false;
        i64 k = e - first;
        if ((stepped >> k & 1) == 0) return false;
        io.rewards[0] = rewards[k];
        io.terminations[0] = terminations[k];
        io.truncations[0] = truncations[k];
        return true;
    }

  private:
    static u64 mask_of(const i32 (&flags)[LANES]) {
        u64 mask = 0;
        for (int k = 0; k < LANES; ++k) mask |= (u64)(u32)flags[k] << k;
        return mask;
    }

    template <class T, int N>
    static void take(T (&own)[N], const T (&lanes)[N][LANES], int k) {
        for (int j = 0; j < N; ++j) own[j] = lanes[j][k];
    }
    template <class T, int N>
    static void give(const T (&own)[N], T (&lanes)[N][LANES], int k) {
        for (int j = 0; j < N; ++j) lanes[j][k] = own[j];
    }

    // GCC and Clang find vectors in loops over local arrays, of a fixed length, with all that is called inside; and
    // where what a lane works on, its flags above all, is scalar until its end, when each becomes an integer.
    __attribute__((flatten, noinline)) void tick() {
        const int n = size;
        Lanes lanes;
        Own unused;
        alignas(64) Action action[ACTION_HEADS][LANES];
        alignas(64) Observation obs[OBS_SIZE][LANES];
        alignas(64) float reward[LANES];
        alignas(64) i32 time[LANES], is_ready[LANES], terminated[LANES], truncated[LANES], was_rare[LANES];
        alignas(64) u32 key0[LANES], key1[LANES], episode[LANES];  // dropped by the compiler where nothing is drawn

        each_field(lanes, unused, s, [&](auto& near, auto& own, auto* far) {
            constexpr int N = sizeof own / sizeof *own;
            for (int k = 0; k < n; ++k)
                for (int j = 0; j < N; ++j) near[j][k] = far[(first + k) * N + j];
        });
        for (int k = 0; k < n; ++k) time[k] = m.time[first + k] + 1;
        for (int k = 0; k < n; ++k) {
            key0[k] = (u32)m.key[2 * (first + k)];
            key1[k] = (u32)m.key[2 * (first + k) + 1];
            episode[k] = (u32)m.episode[first + k];
        }
        for (int k = 0; k < n; ++k) is_ready[k] = ((const u8*)m.active)[first + k];
        for (int k = n; k < LANES; ++k) is_ready[k] = 0;
        for (int k = 0; k < n; ++k)
            for (int j = 0; j < ACTION_HEADS; ++j) {
                i64 at = (first + k) * ACTION_HEADS + j;
                if (wide) {
                    WideAction a = ((const WideAction*)actions)[at];
                    action[j][k] = (Action)a;
                    is_ready[k] = action[j][k] == a ? is_ready[k] : 0;
                } else {
                    action[j][k] = ((const Action*)actions)[at];
                }
            }
        bool active = true;
        Machine ready_machine = {};
        ready_machine.active = &active;
        for (int k = 0; k < n; ++k) {
            Action own_action[ACTION_HEADS];
            take(own_action, action, k);
            Io io = {};
            io.actions = own_action;
            is_ready[k] = action_fault(ready_machine, io) == 0 ? is_ready[k] : 0;
        }

        // The other lanes are copies of one that is ready: no step is made that would not be made anyhow.
        const u64 ready = mask_of(is_ready);
        if (__builtin_popcountll(ready) < LANES / 4) return;  // then it takes longer than one by one
        const int model = __builtin_ctzll(ready);
        for (u64 rest = ~ready; rest != 0; rest &= rest - 1) {
            int k = __builtin_ctzll(rest);
            each_field(lanes, unused, s, [&](auto& near, auto&, auto*) {
                for (auto& item : near) item[k] = item[model];
            });
            for (auto& item : action) item[k] = item[model];
            time[k] = time[model];
            key0[k] = key0[model];
            key1[k] = key1[model];
            episode[k] = episode[model];
        }

        in_step = true;
        for (int k = 0; k < LANES; ++k) {
            Own own;
            Action own_action[ACTION_HEADS];
            float r = 0;
            bool over = false, cut = false;
            each_field(lanes, own, s, [&](auto& near, auto& own, auto*) { take(own, near, k); });
            take(own_action, action, k);
            Io io = {};
            io.rng = {key0[k], key1[k], STEP_STREAM, episode[k], (u32)time[k]};
            io.time = time[k];
            io.active = &active;
            io.rewards = &r;
            io.terminations = &over;
            io.truncations = &cut;
            io.actions = own_action;
            left_out = 0;
            step(state_of(own, s), io);
            each_field(lanes, own, s, [&](auto& near, auto& own, auto*) { give(own, near, k); });
            reward[k] = r;
            terminated[k] = over ? 1 : 0;
            truncated[k] = cut ? 1 : 0;
            was_rare[k] = (i32)left_out;
        }
        for (int k = 0; k < LANES; ++k) {
            Own own;
            Action own_action[ACTION_HEADS];
            float r = reward[k];
            bool over = terminated[k] != 0, cut = truncated[k] != 0;
            Observation row[1][OBS_SIZE];
            each_field(lanes, own, s, [&](auto& near, auto& own, auto*) { take(own, near, k); });
            take(own_action, action, k);
            Io io = {};
            io.rng = {key0[k], key1[k], STEP_STREAM, episode[k], (u32)time[k]};
            io.time = time[k];
            io.active = &active;
            io.rewards = &r;
            io.terminations = &over;
            io.truncations = &cut;
            io.actions = own_action;
            io.obs = row;
            left_out = 0;
            observe(state_of(own, s), io);
            give(row[0], obs, k);
            was_rare[k] |= (i32)left_out;
        }
        in_step = false;

        alignas(64) i32 is_stepped[LANES], goes_on[LANES];
        for (int k = 0; k < LANES; ++k) {
            is_stepped[k] = is_ready[k] & ~was_rare[k];
            goes_on[k] = is_stepped[k] & ~terminated[k] & ~truncated[k];
        }
        each_field(lanes, unused, s, [&](auto& near, auto& own, auto* far) {
            constexpr int N = sizeof own / sizeof *own;
            for (int k = 0; k < n; ++k)
                for (int j = 0; j < N; ++j) {
                    auto& item = far[(first + k) * N + j];
                    item = is_stepped[k] ? near[j][k] : item;
                }
        });
        for (int k = 0; k < n; ++k) m.time[first + k] = goes_on[k] ? time[k] : m.time[first + k];
        for (int k = 0; k < n; ++k) {
            float sum = m.returns[first + k];
            m.returns[first + k] = goes_on[k] ? sum + reward[k] : sum;
        }
        for (int k = 0; k < n; ++k)
            for (int j = 0; j < OBS_SIZE; ++j) out.obs[(first + k) * OBS_SIZE + j] = obs[j][k];
        for (int k = 0; k < n; ++k) out.rewards[first + k] = reward[k];
        for (int k = 0; k < n; ++k) {
            out.terminations[first + k] = out.truncations[first + k] = out.final_mask[first + k] = false;
            out.active[first + k] = true;
        }
        for (int k = 0; k < LANES; ++k) {
            rewards[k] = reward[k];
            terminations[k] = terminated[k];
            truncations[k] = truncated[k];
        }
        stepped = mask_of(is_stepped);
        ended = stepped & ~mask_of(goes_on);
        others &= ~stepped;
    }

    const Machine m;
    const State s;
    const void* const actions;
    const i32 wide;
    const Outputs out;
    i64 first = 0, end = 0;  // of what is being done; of all
    int size = 0;            // how many are being done, the k-th of them being the k-th bit of a word
    u64 stepped = 0;         // here
    u64 ended = 0;           // of these, those left to do
    u64 others = 0;          // left to do, their step too
    i32 terminations[LANES], truncations[LANES];
    float rewards[LANES];
};
#define FOR_REPLICAS_LEFT(e, n, run) \
    for (i64 e = run.begin((i64)(n) * worker_ / workers_, (i64)(n) * (worker_ + 1) / workers_); run.next(e);)

#endif

}  // namespace lockstep
