// How a packed matrix lies in memory for multiplication.
//
// The files keep rows one after another; here 16 rows lie side by side, so that one vector holds 4 weights of each of 16
// rows, each row in a 32-bit lane of its own: the shape of the dot product instructions (four bytes by four bytes into 32
// bits). Sums of different rows never meet, so there is nothing to add up across a vector, and one activation is
// broadcast to all rows.
//
//     tile    16 rows of the matrix, all columns; the last tile is filled up with rows of scale 0
//     block   16 rows x 32 columns; the unit of storage. A group is 1, 2, 4 or 8 blocks wide
//     step    16 rows x 4 columns of a block, byte 4 * row + column: 64 bytes once each weight has a byte
//
//     base    256 bytes a block: vector v holds step v in the low halves of its bytes and step v + 4 in the high ones
//     bits[i] 64 bytes a block: bit j of a byte belongs to step j
//     scale   16 bytes a group, one a row, as in the files
//
// A plane is one array over all blocks, tile by tile, so a width reads its planes from front to back and nothing else.
#pragma once

#include <cstdint>
#include <cstring>

#include "format.h"

namespace otaro {

constexpr int kTileRows = 16, kBlockColumns = 32, kStepColumns = 4, kSteps = 8;
constexpr int kStepBytes = kTileRows * kStepColumns;
constexpr int kBaseBytes = kTileRows * kBlockColumns / 2, kPlaneBytes = kTileRows * kBlockColumns / 8;
static_assert(kBlockColumns == kBlock && kBaseBytes == 4 * kStepBytes && kPlaneBytes == kStepBytes, "see above");

struct Tiles {
    int64_t rows, columns;
    int64_t tiles, blocks, groups; // blocks and groups: in a row
    int group_blocks;              // blocks in a group
    const uint8_t* base;
    const uint8_t* bits[OTARO_BIT_PLANES];
    const uint8_t* scale;
};

static inline int64_t padded_columns(const Tiles& tiles) { return tiles.blocks * kBlockColumns; }

// The code of one weight at a width.
static inline int tile_code(const Tiles& tiles, int64_t row, int64_t column, int mantissa) {
    const int64_t block = row / kTileRows * tiles.blocks + column / kBlockColumns;
    const int step = static_cast<int>(column % kBlockColumns) / kStepColumns;
    const int64_t byte = row % kTileRows * kStepColumns + column % kStepColumns;
    int code = tiles.base[block * kBaseBytes + step % 4 * kStepBytes + byte] >> (step / 4 * 4) & 15;
    for (int p = 0; p < mantissa - kNarrowest; ++p) {
        code = code << 1 | (tiles.bits[p][block * kPlaneBytes + byte] >> step & 1);
    }
    return code;
}

// The scale of the group a weight is in.
static inline uint8_t tile_scale(const Tiles& tiles, int64_t row, int64_t column) {
    const int64_t group = column / kBlockColumns / tiles.group_blocks;
    return tiles.scale[(row / kTileRows * tiles.groups + group) * kTileRows + row % kTileRows];
}

} // namespace otaro
