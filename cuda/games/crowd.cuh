// SPDX-License-Identifier: Apache-2.0
// Discs that push each other apart where they overlap.
#pragma once
#include "game_api.cuh"
#include "neighbors.cuh"

struct alignas(16) Disc {
    float x, y, radius;  // radius NaN: of a disc that nothing touches, as no comparison with NaN holds
};

struct Contact {
    float dx, dy, square, reach;  // from the other's centre, squared distance, distance at which they touch
    HD Contact(const Disc& own, const Disc& other) : dx(own.x - other.x), dy(own.y - other.y) {
        square = dx * dx + dy * dy;
        reach = own.radius + other.radius;
    }
};

// Where disc u is after all N have pushed at once.
template <int N>
HD Point place_of_pushed(const Disc* discs, int u) {
    Disc own = discs[u];
    float push_x = 0, push_y = 0;
    for (int first = 0; first < N; first += 32) {
        // Bit k: touches disc first + k. As few do, they are found without branches, which lets all loads overlap.
        u32 touching = 0;
        UNROLL for (int k = 0; k < 32; ++k) {
            int v = first + k;
            Contact contact(own, discs[v < N ? v : u]);
            touching |= (u32)(v < N && v != u && contact.square < contact.reach * contact.reach) << k;
        }
        for (; touching != 0; touching &= touching - 1) {
            Contact contact(own, discs[first + math::lowest_bit(touching)]);
            float overlap = math::max(0.0f, contact.reach / (math::sqrt(contact.square) + 1e-6f) - 1);
            push_x += contact.dx * overlap, push_y += contact.dy * overlap;
        }
    }
    return {own.x + push_x / 2, own.y + push_y / 2};
}

template <int N, class Positions>
HD void push_apart(const Disc* discs, Positions positions) {
    FOR_RANGE (u, N) {
        Point place = place_of_pushed<N>(discs, u);
        positions[u][0] = place.x;
        positions[u][1] = place.y;
    }
}
