// What a grammar costs over a model's tokens: grammar_bench MODEL < bench/grammar/shapes.jsonl. Each line is the value
// of a request's structured_outputs. Writes for each: how long checking and compiling took, the bytes it keeps, the
// first mask, and the masks and accepted tokens along texts whose tokens are drawn uniformly from the masks.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>

#include "model/checkpoint.h"
#include "server/cli/model_text.h"
#include "server/openai/structured_output.h"

namespace {

using namespace dovetail;
using server::Json;
using Clock = std::chrono::steady_clock;

constexpr int kTexts = 4;
constexpr int kLongest = 500;

double Since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

TokenId Draw(const std::vector<uint32_t>& mask, std::mt19937_64& random) {
  std::vector<TokenId> all;
  for (size_t i = 0; i < mask.size() * 32; ++i)
    if (mask[i / 32] >> (i % 32) & 1) all.push_back(static_cast<TokenId>(i));
  return all.empty() ? -1 : all[random() % all.size()];
}

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * static_cast<double>(values.size())))];
}

void Measure(const Json& value, const server::ServedModel& model) {
  const std::string name = server::Dump(value).substr(0, 60);
  const auto begin = Clock::now();
  server::GenerationFields fields;
  proto::SamplingParams sampling;
  absl::Status status = server::ParseStructuredOutput(Json{{"structured_outputs", value}}, model, fields);
  if (status.ok()) status = server::ChooseGrammar(fields.grammar, fields.grammar_param, model, nullptr, sampling);
  const double ready = Since(begin);
  if (!status.ok())
    return (void)std::printf("%-60s refused in %.1f ms: %s\n", name.c_str(), ready,
                             std::string(status.message()).substr(0, 160).c_str());
  const auto compiled = model.grammars->Compile(sampling.grammar.source);
  const size_t words = (static_cast<size_t>(model.vocab_size) + 31) / 32;
  std::vector<uint32_t> mask(words);
  std::vector<double> masks, accepts;
  double first = 0;
  std::mt19937_64 random(1);
  for (int i = 0; i < kTexts; ++i) {
    grammar::Matcher matcher(*compiled, model.end_token_ids);
    for (int n = 0; n < kLongest && !matcher.ended(); ++n) {
      auto at = Clock::now();
      if (!matcher.FillMask(mask).ok()) break;
      masks.push_back(Since(at));
      if (masks.size() == 1) first = masks.back();
      const TokenId token = Draw(mask, random);
      at = Clock::now();
      if (token < 0 || !matcher.Accept(token)) break;
      accepts.push_back(Since(at));
    }
  }
  std::printf(
      "%-60s ready %.1f ms; masks %zu: first %.3f, p50 %.3f, p99 %.3f, max %.3f ms; accept p99 %.3f, max %.3f\n",
      name.c_str(), ready, masks.size(), first, Quantile(masks, 0.5), Quantile(masks, 0.99), Quantile(masks, 1),
      Quantile(accepts, 0.99), Quantile(accepts, 1));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "grammar_bench MODEL < LINES\n", 2;
  const auto checkpoint = model::OpenCheckpoint(argv[1]);
  if (!checkpoint.ok()) return std::cerr << checkpoint.status() << '\n', 1;
  server::ServedModel model;
  model.vocab_size = static_cast<int>((*checkpoint)->config().vocab_size);
  model.end_token_ids = (*checkpoint)->config().stop_ids;
  model.grammars = cli::MakeGrammars(**checkpoint);
  const auto begin = Clock::now();
  if (const auto warm = model.grammars->Compile(grammar::SourceOf(grammar::Kind::kRegex, "a")); !warm.ok())
    return std::cerr << warm.status() << '\n', 1;
  std::printf("tokenizer and its info: %.0f ms\n", Since(begin));
  for (std::string line; std::getline(std::cin, line);) {
    Measure(Json::parse(line), model);
    std::fflush(stdout);
  }
}
