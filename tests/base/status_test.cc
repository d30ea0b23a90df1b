#include "base/status.h"

#include <gtest/gtest.h>

namespace dovetail {
namespace {

absl::StatusOr<int> Half(int x) {
  if (x % 2 != 0) return InvalidArgument("x: ", x, " is odd");
  return x / 2;
}

absl::StatusOr<int> Quarter(int x) {
  DT_ASSIGN_OR_RETURN(const int half, Half(x));
  DT_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

TEST(Status, AssignOrReturnPassesValuesAndStopsAtTheFirstError) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status().message(), "x: 3 is odd");
}

TEST(Status, AnnotateKeepsTheCodeAndPrefixesTheMessage) {
  const absl::Status status = Annotate(Half(3).status(), "model.gguf");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "model.gguf: x: 3 is odd");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "anything").ok());
}

}  // namespace
}  // namespace dovetail
