// The C ABI: checks every setting and the size of every buffer, then splits the work over threads.

#include <atomic>
#include <cstdint>

#include "checks.h"
#include "threads.h"

namespace otaro {
namespace {

// ---- work -----------------------------------------------------------------------------------------------------------

// What all ranges of a tensor found together: the first weight that is not finite, whichever thread met it.
class SharedFindings {
  public:
    bool pointless(int64_t first_weight) const {
        const int64_t found = not_finite_.load(std::memory_order_relaxed);
        return found >= 0 && found < first_weight;
    }

    void merge(const Findings& findings) {
        below_.fetch_add(findings.below, std::memory_order_relaxed);
        above_.fetch_add(findings.above, std::memory_order_relaxed);
        if (findings.not_finite < 0) return;
        int64_t seen = not_finite_.load(std::memory_order_relaxed);
        while ((seen < 0 || findings.not_finite < seen) &&
               !not_finite_.compare_exchange_weak(seen, findings.not_finite, std::memory_order_relaxed)) {
        }
    }

    int64_t below() const { return below_.load(); }
    int64_t above() const { return above_.load(); }
    int64_t not_finite() const { return not_finite_.load(); }

  private:
    std::atomic<int64_t> below_{0}, above_{0}, not_finite_{-1};
};

int64_t group_offset(const Geometry& geometry, int64_t group) {
    return group / geometry.groups * geometry.columns + group % geometry.groups * geometry.group_size;
}

// Runs a kernel that may find a bad weight over all groups.
template <class Job>
int run_finding(const Job& job, void (*kernel)(const Job&, int64_t, int64_t, Findings&), const Checks& checks,
                int threads, SharedFindings& shared, int64_t* not_finite) {
    auto body = [&](int64_t first, int64_t last) {
        if (shared.pointless(group_offset(checks.geometry(), first))) return;
        Findings findings;
        kernel(job, first, last, findings);
        shared.merge(findings);
    };
    parallel(threads, checks.all_groups(), checks.group_grain(), body);
    *not_finite = shared.not_finite();
    return shared.not_finite() < 0 ? OTARO_OK : OTARO_ERROR_NOT_FINITE;
}

template <class Job>
int run_groups(const Job& job, void (*kernel)(const Job&, int64_t, int64_t), const Checks& checks, int threads) {
    auto body = [&](int64_t first, int64_t last) { kernel(job, first, last); };
    parallel(threads, checks.all_groups(), checks.group_grain(), body);
    return OTARO_OK;
}

// Of the tiers those that have a say at a width, up to the first that decides its last bit; else the weight itself does.
Deciding deciding(const void* weight, const otaro_tiers* tiers, int mantissa) {
    Deciding result{};
    for (int i = 0; tiers != nullptr && i < tiers->count; ++i) {
        result.weight[result.count] = tiers->weight[i];
        result.mantissa[result.count++] = tiers->mantissa[i];
        if (tiers->mantissa[i] >= mantissa) return result;
    }
    result.weight[result.count] = weight;
    result.mantissa[result.count++] = kWidest;
    return result;
}

int64_t row_grain(const Geometry& geometry, int64_t weights) {
    return geometry.columns < weights ? weights / (geometry.columns + 1) + 1 : 1;
}

} // namespace
} // namespace otaro

using namespace otaro;

int32_t otaro_abi_version(void) { return OTARO_ABI_VERSION; }

int32_t otaro_isa_supported(int32_t isa) { return kernels_for(isa) != nullptr; }

int32_t otaro_best_isa(void) { return best_isa(); }

int32_t otaro_scales(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                     int64_t weight_bytes, int32_t dtype, uint8_t* scale, int64_t scale_bytes, int32_t threads,
                     int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        const ScalesJob job{checks.from(weight, weight_bytes, dtype, nullptr, 0), scale};
        checks.buffer(scale, scale_bytes, checks.all_groups());
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        return run_groups(job, kernels->scales, checks, threads);
    });
}

int32_t otaro_encode(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                     int64_t weight_bytes, int32_t dtype, int32_t mantissa, const uint8_t* scale, int64_t scale_bytes,
                     const otaro_codes* codes, int64_t* not_finite, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(valid_mantissa(mantissa) && not_finite != nullptr);
        const Weights from = checks.from(weight, weight_bytes, dtype, scale, scale_bytes);
        checks.codes(codes);
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        const EncodeJob job{from, mantissa, *codes};
        SharedFindings shared;
        return run_finding(job, kernels->encode, checks, threads, shared, not_finite);
    });
}

int32_t otaro_decode(const otaro_format* format, int64_t rows, int64_t columns, const otaro_codes* codes,
                     int32_t mantissa, void* value, int64_t value_bytes, int32_t dtype, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(valid_dtype(dtype) && valid_mantissa(mantissa));
        checks.codes(codes);
        checks.buffer(value, value_bytes, checks.weights(), dtype_bytes(dtype));
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() == OTARO_OK) checks.scales(codes->scale, codes->scale_bytes);
        if (checks.error() != OTARO_OK) return checks.error();
        const DecodeJob job{checks.geometry(), *format, *codes, mantissa, value, dtype};
        return run_groups(job, kernels->decode, checks, threads);
    });
}

int32_t otaro_truncate(int32_t scheme, int64_t count, const int16_t* code, int64_t code_bytes, int32_t from, int32_t to,
                       int16_t* result, int64_t result_bytes, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        const otaro_format format{scheme, kBlock};
        Checks checks(&format, 1, count);
        checks.require(valid_mantissa(from) && valid_mantissa(to) && to <= from);
        checks.buffer(code, code_bytes, count, sizeof *code);
        checks.buffer(result, result_bytes, count, sizeof *result);
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        const TruncateJob job{scheme, code, from, to, result};
        auto body = [&](int64_t first, int64_t last) { kernels->truncate(job, first, last); };
        parallel(threads, count, kRangeWeights, body);
        return OTARO_OK;
    });
}

int32_t otaro_pack(const otaro_format* format, int64_t rows, int64_t columns, const void* weight, int64_t weight_bytes,
                   int32_t dtype, const uint8_t* scale, int64_t scale_bytes, const otaro_planes* planes,
                   int64_t* clamped, int64_t* not_finite, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(clamped != nullptr && not_finite != nullptr);
        const Weights from = checks.from(weight, weight_bytes, dtype, scale, scale_bytes);
        checks.planes(planes, planes != nullptr ? static_cast<int>(planes->bits_count) : 0);
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        const PackJob job{from, *planes};
        SharedFindings shared;
        const int error = run_finding(job, kernels->pack, checks, threads, shared, not_finite);
        clamped[0] = shared.below();
        clamped[1] = shared.above();
        return error;
    });
}

int32_t otaro_dequantize(const otaro_format* format, int64_t rows, int64_t columns, const otaro_planes* planes,
                         int32_t mantissa, void* value, int64_t value_bytes, int32_t dtype, int32_t threads,
                         int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(valid_dtype(dtype));
        checks.planes_of(planes, mantissa);
        checks.buffer(value, value_bytes, checks.weights(), dtype_bytes(dtype));
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        const PlanesJob job{checks.geometry(), *format, *planes, mantissa, dtype};
        auto body = [&](int64_t first, int64_t last) {
            const int64_t offset = group_offset(job.geometry, first) * dtype_bytes(dtype);
            kernels->dequantize(job, first, last, static_cast<uint8_t*>(value) + offset);
        };
        parallel(threads, checks.all_groups(), checks.group_grain(), body);
        return OTARO_OK;
    });
}

int32_t otaro_quantize(const otaro_format* format, int64_t rows, int64_t columns, const void* weight,
                       int64_t weight_bytes, int32_t dtype, int32_t mantissa, const otaro_tiers* tiers,
                       const uint8_t* scale, int64_t scale_bytes, void* value, int64_t value_bytes, int32_t threads,
                       int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(valid_mantissa(mantissa));
        const Weights from = checks.from(weight, weight_bytes, dtype, scale, scale_bytes);
        checks.tiers(tiers, dtype);
        checks.buffer(value, value_bytes, checks.weights(), dtype_bytes(dtype));
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        const QuantizeJob job{from, deciding(weight, tiers, mantissa), mantissa, value};
        return run_groups(job, kernels->quantize, checks, threads);
    });
}

int32_t otaro_rows(const otaro_format* format, int64_t rows, int64_t columns, const otaro_planes* planes,
                   int32_t mantissa, const int64_t* index, int64_t index_bytes, int64_t count, void* value,
                   int64_t value_bytes, int32_t dtype, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(valid_dtype(dtype) && count >= 0);
        checks.planes_of(planes, mantissa, false);
        checks.buffer(index, index_bytes, count, sizeof *index);
        int64_t values = 0;
        checks.require(!__builtin_mul_overflow(count, columns, &values));
        checks.buffer(value, value_bytes, values, dtype_bytes(dtype));
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        const int64_t groups = checks.geometry().groups;
        for (int64_t i = 0; i < count; ++i) {
            if (index[i] < 0 || index[i] >= rows) return OTARO_ERROR_INDEX;
            if (!valid_scales(planes->scale + index[i] * groups, groups, format->scheme)) return OTARO_ERROR_SCALE;
        }
        const PlanesJob job{checks.geometry(), *format, *planes, mantissa, dtype};
        auto body = [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                uint8_t* const row = static_cast<uint8_t*>(value) + i * columns * dtype_bytes(dtype);
                kernels->dequantize(job, index[i] * groups, (index[i] + 1) * groups, row);
            }
        };
        parallel(threads, count, row_grain(job.geometry, kRangeWeights), body);
        return OTARO_OK;
    });
}

int32_t otaro_linear(const otaro_format* format, int64_t rows, int64_t columns, const otaro_planes* planes,
                     int32_t mantissa, const float* x, int64_t x_bytes, int64_t batch, const float* bias,
                     int64_t bias_bytes, float* y, int64_t y_bytes, int32_t threads, int32_t isa) {
    return guarded([&]() -> int {
        Checks checks(format, rows, columns);
        checks.require(batch >= 0);
        checks.planes_of(planes, mantissa);
        int64_t inputs = 0, outputs = 0;
        checks.require(!__builtin_mul_overflow(batch, columns, &inputs));
        checks.require(!__builtin_mul_overflow(batch, rows, &outputs));
        checks.buffer(x, x_bytes, inputs, sizeof *x);
        checks.buffer(y, y_bytes, outputs, sizeof *y);
        if (bias != nullptr) checks.buffer(bias, bias_bytes, rows, sizeof *bias);
        const Kernels* const kernels = checks.kernels(threads, isa);
        if (checks.error() != OTARO_OK) return checks.error();
        if (batch == 0) return OTARO_OK; // rows without columns take no memory: there may be any number of them
        const PlanesJob weight{checks.geometry(), *format, *planes, mantissa, OTARO_FLOAT32};
        const LinearJob job{weight, x, batch, bias, y};
        auto body = [&](int64_t first, int64_t last) { kernels->linear(job, first, last); };
        parallel(threads, rows, row_grain(weight.geometry, kRangeWeights / 2), body);
        return OTARO_OK;
    });
}
