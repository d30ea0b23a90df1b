#include "model/formats/dequantize.h"

#include "base/check.h"

namespace dovetail::model {

kernels::RowFormat RowFormatOf(GgmlType type) {
  using kernels::RowFormat;
  switch (type) {
    case GgmlType::kF32: return RowFormat::kF32;
    case GgmlType::kF16: return RowFormat::kF16;
    case GgmlType::kBF16: return RowFormat::kBF16;
    case GgmlType::kQ4_0: return RowFormat::kQ4_0;
    case GgmlType::kQ4_1: return RowFormat::kQ4_1;
    case GgmlType::kQ5_0: return RowFormat::kQ5_0;
    case GgmlType::kQ5_1: return RowFormat::kQ5_1;
    case GgmlType::kQ8_0: return RowFormat::kQ8_0;
    case GgmlType::kQ4_K: return RowFormat::kQ4_K;
    case GgmlType::kQ5_K: return RowFormat::kQ5_K;
    case GgmlType::kQ6_K: return RowFormat::kQ6_K;
    case GgmlType::kMXFP4: return RowFormat::kMXFP4;
  }
  DT_CHECK(false, "not a GgmlType: ", static_cast<uint32_t>(type));
}

void Dequantize(GgmlType type, const std::byte* blocks, int64_t elements, float* out) {
  DT_CHECK(elements % BlockElements(type) == 0, elements, " elements are not whole blocks");
  if (elements > 0) kernels::DequantizeRow(RowFormatOf(type), blocks, elements, out);
}

}  // namespace dovetail::model
