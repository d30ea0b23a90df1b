#include "tests/emulated_gpu/device.h"

// What a collective of a warp gives its lanes.

namespace emu {
namespace {

float Half(uint32_t pair, int which, bool bf16) {
  const auto bits = static_cast<uint16_t>(pair >> 16 * which);
  if (bf16) return __uint_as_float(uint32_t{bits} << 16);
  return __half2float(__ushort_as_half(bits));
}

// Operands as PTX ISA 9.7.14 lays them out: lane = 4 group + quarter.
void RunMma(Fiber* lanes, Op op) {
  const int depth = op == kMmaTF32 ? 8 : 16;
  const bool bf16 = op == kMmaBF16;
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, q = l % 4;
    const uint32_t *const x = lanes[l].in + 4, *const y = lanes[l].in + 8;
    for (int i = 0; i < 4; ++i) std::memcpy(&d[g + i / 2 * 8][2 * q + i % 2], lanes[l].in + i, 4);
    if (op == kMmaTF32) {
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][q + i / 2 * 4] = __uint_as_float(x[i] & ~0x1fffu);
      for (int i = 0; i < 2; ++i) b[q + 4 * i][g] = __uint_as_float(y[i] & ~0x1fffu);
    } else {
      for (int i = 0; i < 8; ++i) a[g + i / 2 % 2 * 8][2 * q + i % 2 + i / 4 * 8] = Half(x[i / 2], i % 2, bf16);
      for (int i = 0; i < 4; ++i) b[2 * q + i % 2 + i / 2 * 8][g] = Half(y[i / 2], i % 2, bf16);
    }
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < 8; ++n) d[i][n] += a[i][k] * b[k][n];
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) std::memcpy(lanes[l].out + i, &d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2], 4);
}
void LoadMatrices(Fiber* lanes, bool turned) {
  for (int m = 0; m < 4; ++m) {
    const std::byte* rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = SharedAt(lanes[8 * m + i].in[0], 16, 16);
    for (int l = 0; l < 32; ++l) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i)
        std::memcpy(&pair[i], turned ? rows[l % 4 * 2 + i] + l / 4 * 2 : rows[l / 4] + (l % 4 * 2 + i) * 2, 2);
      lanes[l].out[m] = pair[0] | uint32_t{pair[1]} << 16;
    }
  }
}
}  // namespace

void RunCollective(Op op, Fiber* lanes, uint32_t mask) {
  uint32_t votes = 0;
  switch (op) {
    case kSync: return;
    case kShuffle:
      for (uint32_t left = mask; left != 0; left &= left - 1) {
        Fiber& f = lanes[__builtin_ctz(left)];
        if ((mask >> f.from & 1) == 0) Fail("a shuffle from lane %u, which does not take part", f.from);
        std::memcpy(f.out, lanes[f.from].in, 8);
      }
      return;
    case kAll:
    case kAny:
    case kBallot:
      for (int l = 0; l < 32; ++l) votes |= (mask >> l & lanes[l].in[0] & 1) << l;
      for (int l = 0; l < 32; ++l) lanes[l].out[0] = op == kBallot ? votes : op == kAll ? votes == mask : votes != 0;
      return;
    case kMatrices: return LoadMatrices(lanes, false);
    case kMatricesTransposed: return LoadMatrices(lanes, true);
    default: return RunMma(lanes, op);
  }
}

}  // namespace emu
