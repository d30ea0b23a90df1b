#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/quant_format.h"
#include "model/formats/ggml_types.h"

namespace dovetail::model {

// What the kernels call the layout of a row of `type`.
kernels::RowFormat RowFormatOf(GgmlType type);

// Writes `elements` f32 values of consecutive blocks of `type`. `elements` is a multiple of BlockElements(type);
// `blocks` holds RowBytes(type, elements) bytes at any alignment, and may come from an untrusted file: every bit
// pattern is defined (scales may be NaN or infinite, then so are the values). `out` does not overlap `blocks`. Rows lie
// one after another in a file, so one call may span rows.
//
// The values are bit for bit those of ggml's own dequantiser (checked against vectors made with it).
// Threads: pure.
void Dequantize(GgmlType type, const std::byte* blocks, int64_t elements, float* out);

}  // namespace dovetail::model
