// SPDX-License-Identifier: Apache-2.0
// A continuous double auction of two resources between workers: open bids and asks, each for one unit at a price, and
// the order in which they meet. What is offered lies in escrow. For games with the fields orders, coin, inventory,
// labor and price_history of gpu_vecenv/envs/society.py.
#pragma once
#include "game_api.cuh"

constexpr int NONE = 0, BID = 1, ASK = 2;    // the side of an order
constexpr int SIDE = 0, PRICE = 1, AGE = 2;  // of an order
constexpr int MOST_WORKERS = 255, BEYOND_ALL = 1 << 24, EVERYBODY = -1;

// Of all workers: open asks and bids, for stone and for wood, at each price; mean prices of the latest trades.
struct Book {
    CheckedArray<int, 4 * NUM_PRICES> open;
    float market_rate[2];
};

// Coin in a worker's bids.
HD int escrow(State s, int i) {
    int sum = 0;
    for (int k = 0; k < 2 * MAX_NUM_ORDERS; ++k) {
        const u8* order = &s.orders[i][k / MAX_NUM_ORDERS][k % MAX_NUM_ORDERS][0];
        sum += order[SIDE] == BID ? order[PRICE] : 0;
    }
    return sum;
}

HD bool has_free_order(State s, int i, int c) {
    for (int k = 0; k < MAX_NUM_ORDERS; ++k)
        if (s.orders[i][c][k][SIDE] == NONE) return true;
    return false;
}

// What a worker offers goes into escrow.
HD void place_order(State s, int i, int c, int side, int price) {
    if (side == BID ? s.coin[i] < (float)price : s.inventory[i][c] <= 0) return;
    for (int k = 0; k < MAX_NUM_ORDERS; ++k) {
        u8* order = &s.orders[i][c][k][0];
        if (order[SIDE] != NONE) continue;
        order[SIDE] = (u8)side;
        order[PRICE] = (u8)price;
        order[AGE] = 0;
        if (side == BID)
            s.coin[i] -= (float)price;
        else
            --s.inventory[i][c];
        s.labor[i] += ORDER_LABOR;
        return;
    }
}

// The order of this side that comes first: of the best price, then the oldest, then of the first worker. It ranks below
// `below` and is not of `except`, a worker or EVERYBODY for none. Returns its rank, -1 if there is none.
HD int first_order(State s, int c, int side, int except, int below, int* found) {
    int best = -1;
    for (int i = 0; i < NUM_WORKERS; ++i)
        for (int k = 0; k < MAX_NUM_ORDERS && i != except; ++k) {
            const u8* order = &s.orders[i][c][k][0];
            int price = side == BID ? order[PRICE] : NUM_PRICES - 1 - order[PRICE];
            int rank = (price << 8 | order[AGE]) << 8 | (MOST_WORKERS - i);
            if (order[SIDE] != side || rank <= best || rank >= below) continue;
            best = rank;
            *found = i * MAX_NUM_ORDERS + k;
        }
    return best;
}

// Bids in their order each meet the first ask of another worker; the older order's price counts.
HD void match_orders(State s, int c) {
    int bid = 0, ask = 0;
    if (first_order(s, c, ASK, EVERYBODY, BEYOND_ALL, &ask) < 0) return;
    int cheapest = s.orders[ask / MAX_NUM_ORDERS][c][ask % MAX_NUM_ORDERS][PRICE];
    for (int rank = BEYOND_ALL; (rank = first_order(s, c, BID, EVERYBODY, rank, &bid)) >= 0;) {
        int buyer = bid / MAX_NUM_ORDERS;
        if (s.orders[buyer][c][bid % MAX_NUM_ORDERS][PRICE] < cheapest) return;
        if (first_order(s, c, ASK, buyer, BEYOND_ALL, &ask) < 0) continue;
        int seller = ask / MAX_NUM_ORDERS;
        u8 *bought = &s.orders[buyer][c][bid % MAX_NUM_ORDERS][0],
           *sold = &s.orders[seller][c][ask % MAX_NUM_ORDERS][0];
        if (bought[PRICE] < sold[PRICE]) continue;
        int price = bought[AGE] <= sold[AGE] ? sold[PRICE] : bought[PRICE];
        bought[SIDE] = sold[SIDE] = NONE;
        ++s.inventory[buyer][c];
        s.coin[seller] += (float)price;
        s.coin[buyer] += (float)(bought[PRICE] - price);
        s.price_history[c][price] += 1.0f;
    }
}

// Orders that were open for ORDER_DURATION steps give back what was offered.
HD void age_orders(State s, int i) {
    for (int c = 0; c < 2; ++c)
        for (int k = 0; k < MAX_NUM_ORDERS; ++k) {
            u8* order = &s.orders[i][c][k][0];
            if (order[SIDE] == NONE || order[AGE]++ < ORDER_DURATION) continue;
            if (order[SIDE] == BID)
                s.coin[i] += (float)order[PRICE];
            else
                ++s.inventory[i][c];
            order[SIDE] = NONE;
        }
}

// Where a histogram has the orders of one side for a resource: asks, then bids.
HD int place_of(const u8* order, int c) { return ((order[SIDE] == BID) * 2 + c) * NUM_PRICES + order[PRICE]; }

// What is open in the market, and its mean prices; group_sync() before put_market().
HD void sum_up_market(State s, Book& book) {
    FOR_RANGE (c, 2) {
        for (int k = 0; k < 2 * NUM_PRICES; ++k) book.open[(k / NUM_PRICES * 2 + c) * NUM_PRICES + k % NUM_PRICES] = 0;
        for (int k = 0; k < NUM_WORKERS * MAX_NUM_ORDERS; ++k) {
            const u8* order = &s.orders[k / MAX_NUM_ORDERS][c][k % MAX_NUM_ORDERS][0];
            if (order[SIDE] != NONE) ++book.open[place_of(order, c)];
        }
        float trades = 0, paid = 0;
        for (int price = 0; price < NUM_PRICES; ++price) {
            trades += s.price_history[c][price];
            paid += (float)price * s.price_history[c][price];
        }
        book.market_rate[c] = paid / math::max(trades, 0.001f);
    }
}

// The market's prices and what the orders of worker i, or of nobody, leave open.
HD float* put_market(float* row, State s, const Book& book, int i) {
    float *open = row, *own = row + 4 * NUM_PRICES + 2;
    for (int k = 0; k < 4 * NUM_PRICES; ++k) open[k] = (float)book.open[k];
    row += 4 * NUM_PRICES;
    for (int c = 0; c < 2; ++c) *row++ = book.market_rate[c];
    if (i < NUM_WORKERS) {
        for (int k = 0; k < 4 * NUM_PRICES; ++k) *row++ = 0;
        for (int k = 0; k < 2 * MAX_NUM_ORDERS; ++k) {
            const u8* order = &s.orders[i][k / MAX_NUM_ORDERS][k % MAX_NUM_ORDERS][0];
            int place = place_of(order, k / MAX_NUM_ORDERS);
            if (order[SIDE] == NONE) continue;
            own[place] += 1;
            open[place] -= 1;
        }
    }
    for (int k = 0; k < 2 * NUM_PRICES; ++k) *row++ = 0.01f * s.price_history[k / NUM_PRICES][k % NUM_PRICES];
    return row;
}
