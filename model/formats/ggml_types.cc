#include "model/formats/ggml_types.h"

#include "base/check.h"

namespace dovetail::model {
namespace {

struct TypeInfo {
  GgmlType type;
  std::string_view name;
  int64_t block_elements;
  int64_t block_bytes;
};

constexpr TypeInfo kTypes[] = {
    {GgmlType::kF32, "F32", 1, 4},       {GgmlType::kF16, "F16", 1, 2},       {GgmlType::kBF16, "BF16", 1, 2},
    {GgmlType::kQ4_0, "Q4_0", 32, 18},   {GgmlType::kQ4_1, "Q4_1", 32, 20},   {GgmlType::kQ5_0, "Q5_0", 32, 22},
    {GgmlType::kQ5_1, "Q5_1", 32, 24},   {GgmlType::kQ8_0, "Q8_0", 32, 34},   {GgmlType::kQ4_K, "Q4_K", 256, 144},
    {GgmlType::kQ5_K, "Q5_K", 256, 176}, {GgmlType::kQ6_K, "Q6_K", 256, 210}, {GgmlType::kMXFP4, "MXFP4", 32, 17},
};

struct OtherType {
  uint32_t id;
  std::string_view name;
};

// Known to ggml, not read here; named so that an error can say what the file wants.
constexpr OtherType kOtherTypes[] = {
    {4, "Q4_2"},      {5, "Q4_3"},      {9, "Q8_1"},   {10, "Q2_K"},   {11, "Q3_K"},  {15, "Q8_K"},  {16, "IQ2_XXS"},
    {17, "IQ2_XS"},   {18, "IQ3_XXS"},  {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"},
    {24, "I8"},       {25, "I16"},      {26, "I32"},   {27, "I64"},    {28, "F64"},   {29, "IQ1_M"}, {31, "Q4_0_4_4"},
    {32, "Q4_0_4_8"}, {33, "Q4_0_8_8"}, {34, "TQ1_0"}, {35, "TQ2_0"},
};

const TypeInfo& Info(GgmlType type) {
  for (const TypeInfo& info : kTypes) {
    if (info.type == type) return info;
  }
  DT_CHECK(false, "not a GgmlType: ", static_cast<uint32_t>(type));
  __builtin_unreachable();
}

}  // namespace

std::optional<GgmlType> GgmlTypeFromId(uint32_t id) {
  for (const TypeInfo& info : kTypes) {
    if (static_cast<uint32_t>(info.type) == id) return info.type;
  }
  return std::nullopt;
}

std::string GgmlTypeName(uint32_t id) {
  if (const auto type = GgmlTypeFromId(id)) return std::string(Name(*type));
  for (const OtherType& other : kOtherTypes) {
    if (other.id == id) return std::string(other.name);
  }
  return "type " + std::to_string(id);
}

std::string_view Name(GgmlType type) { return Info(type).name; }
int64_t BlockElements(GgmlType type) { return Info(type).block_elements; }
int64_t BlockBytes(GgmlType type) { return Info(type).block_bytes; }

}  // namespace dovetail::model
