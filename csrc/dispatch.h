// Which instructions this machine runs.
#pragma once

#include "kernels.h"

namespace otaro {

// The kernels for an `otaro_isa`, OTARO_AUTO meaning the best; null where the machine or the build lacks them.
const Kernels* kernels_for(int32_t isa);
int32_t best_isa();

} // namespace otaro
