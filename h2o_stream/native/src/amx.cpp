#include "amx.h"

#if defined(H2O_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {
namespace {

// The system call that lets a process use a part of the processor's state, and the number of the tiles.
constexpr long kRequestPermission = 0x1023, kTileData = 18;

// Of all eight tiles: kSize rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kSize, kSize, kSize, kSize, kSize, kSize, kSize, kSize};
};

bool processor_supports() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24)) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);  // AVX512-BF16
}

}  // namespace

bool available() {
  static const bool is_available =
      processor_supports() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_available;
}

Tiles::Tiles() {
  static constexpr TileConfig config;  // in memory: GCC does not know that all of it is read
  _tile_loadconfig(&config);
}

Tiles::~Tiles() { _tile_release(); }

}  // namespace amx

#else

bool amx::available() { return false; }

#endif
