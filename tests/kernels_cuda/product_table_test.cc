#include "kernels/cuda/products/product_table.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace dovetail::kernels::cuda {
namespace {

namespace fs = std::filesystem;

ProductTable::Algorithm Some(uint8_t seed) {
  ProductTable::Algorithm algorithm;
  for (size_t i = 0; i < algorithm.size(); ++i) algorithm[i] = static_cast<uint8_t>(seed * 31 + i);
  return algorithm;
}

class ProductTableTest : public ::testing::Test {
 protected:
  ProductTableTest() {
    folder_ = fs::temp_directory_path() / ("product_table_test." + std::to_string(::getpid()));
    path_ = (folder_ / "deeper" / "table").string();
  }
  ~ProductTableTest() override { fs::remove_all(folder_); }
  fs::path folder_;
  std::string path_;
};

TEST_F(ProductTableTest, WhatOneProcessChoseTheNextFinds) {
  ProductTable first(path_);
  EXPECT_EQ(first.Find({1, 2, 3}), nullptr);
  first.Add({1, 2, 3}, Some(1));
  first.Add({1, 2, -4}, Some(2));
  const ProductTable second(path_);
  ASSERT_NE(second.Find({1, 2, 3}), nullptr);
  EXPECT_EQ(*second.Find({1, 2, 3}), Some(1));
  EXPECT_EQ(*second.Find({1, 2, -4}), Some(2));
  EXPECT_EQ(second.Find({1, 2}), nullptr);
}

TEST_F(ProductTableTest, ChoicesOfOthersAreKeptAndWin) {
  ProductTable one(path_), other(path_);
  one.Add({1}, Some(1));
  other.Add({2}, Some(2));
  other.Add({1}, Some(3));
  const ProductTable after(path_);
  EXPECT_EQ(*after.Find({1}), Some(1)) << "the first that was written";
  EXPECT_EQ(*after.Find({2}), Some(2));
}

TEST_F(ProductTableTest, DamagedLinesAreSkipped) {
  { ProductTable(path_).Add({7, 8}, Some(1)); }
  {
    std::ofstream file(path_, std::ios::app);
    const std::string zeros(128, '0');
    file << "\n7 9 :\n7 9 : 00\n: 00\nseven : " << zeros << "\n7 9 : " << zeros.substr(1) << "g\n7 9 : " << zeros
         << " more\n"
         << std::string(100000, '5') << "\n7 10 : " << zeros << "\n";
  }
  const ProductTable read(path_);
  EXPECT_EQ(*read.Find({7, 8}), Some(1));
  EXPECT_EQ(read.Find({7, 9}), nullptr);
  ASSERT_NE(read.Find({7, 10}), nullptr);
  EXPECT_EQ(*read.Find({7, 10}), ProductTable::Algorithm{});
}

TEST_F(ProductTableTest, WithoutAPathNothingIsWrittenAndChoicesLastAsLongAsTheTable) {
  ProductTable table("");
  table.Add({1}, Some(1));
  EXPECT_EQ(*table.Find({1}), Some(1));
  ProductTable nowhere("/proc/not/there/table");
  nowhere.Add({1}, Some(1));
  EXPECT_EQ(*nowhere.Find({1}), Some(1));
}

TEST_F(ProductTableTest, TheDefaultPathIsInTheUsersCache) {
  ASSERT_EQ(::setenv("XDG_CACHE_HOME", "/somewhere", 1), 0);
  EXPECT_EQ(ProductTable::DefaultPath(" NVIDIA H200 130000"), "/somewhere/dovetail/products-NVIDIA-H200-130000");
}

}  // namespace
}  // namespace dovetail::kernels::cuda
