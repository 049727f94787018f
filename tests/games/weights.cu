// Observes its parameters and what follows from them in weights.py and here.
#include "game_api.cuh"
#include "cell_grid.cuh"  // its templates have a parameter K
struct Scratch {};
#if NUM_STEPS_IS_UNKNOWN
#error a directive is kept
#endif
#define TWICE(x) ((x) * 2)   // MASS in a comment
constexpr float PI = 3.25f,  // several in one line
    HEAVY = MASS * 2, THIRD = HEAVY / 3.0f;
namespace inner {
static const float LIGHT = MASS / 2;
}
HD float with_default(float x = LEVER) { return x; }
HD float local() {
    static constexpr float NEAR = LEVER + 1, FAR = 2;
    constexpr float pair[2] = {NEAR, FAR};
    return pair[0] * pair[1];
}
struct Limits {
    float upper = K;
};
HD void reset(State s, Io io) {
    ONCE {
        s.place[0] = MASS;
        for (int j = 0; j < NUM_CELLS; ++j) s.cells[j] = 0;
    }
}
HD void step(State s, Io io) {
    ONCE {
        s.place[0] += LEVER;
        io.truncations[0] = io.elapsed_steps >= NUM_STEPS;
    }
}
HD void observe(State s, Io io) {
    ONCE {
        float numbers[12] = {K,          MASS,         LEVER,          TOTAL,   ROOT,          CACHED, TWICE(HEAVY),
                             THIRD + PI, inner::LIGHT, with_default(), local(), Limits().upper};
        for (int j = 0; j < 12; ++j) io.obs[0][j] = numbers[j];
    }
}
