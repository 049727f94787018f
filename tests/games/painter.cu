#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    FOR_RANGE (k, HEIGHT * WIDTH) s.canvas[k / WIDTH][k % WIDTH] = (u8)io.rng.below(k, 0, 2);
}

HD void step(State s, Io io) {
    ONCE {
        int row = math::clamp(math::to_int((io.action(0, 0) + 1) * 0.5f * HEIGHT), 0, HEIGHT - 1);
        int column = math::clamp(math::to_int(io.action(0, 1) * (WIDTH / 3.0f)), 0, WIDTH - 1);
        io.rewards[0] = s.canvas[row][column] == 0;
        s.canvas[row][column] = 255;
        bool full = true;
        for (int x = 0; x < WIDTH; ++x) full &= s.canvas[row][x] == 255;
        io.terminations[0] = full;
        io.truncations[0] = io.elapsed_steps >= MAX_STEPS && !full;
    }
}

HD void observe(State s, Io io) {
    FOR_RANGE (k, OBS_SIZE) {
        int pixel = k / 3, colour = k % 3;
        u8 value = s.canvas[pixel / WIDTH][pixel % WIDTH];
        io.obs[0][k] = colour == 0 ? value : colour == 1 ? (u8)io.elapsed_steps : (u8)(pixel);
    }
}
