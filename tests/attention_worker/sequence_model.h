#pragma once
#include <map>
#include <random>
#include <string>
#include <vector>

#include "attention_worker/core/sequence_table.h"

namespace dovetail::attention::testing {

// A sequence table and a naive model of it: every token of every sequence is remembered as a number that names it
// and all before it, and every KvBlock as the numbers last written into its 64 slots. Random operations are applied to
// both; whatever a sequence still sees must read back as its own tokens, and every block must be accounted for.
class ModelledTable {
 public:
  ModelledTable(const proto::AttentionTable& table, uint32_t blocks, uint64_t seed);

  // One random operation. Failed expectations go to the current test.
  void RandomOperation();

  // Everything ends; nothing may be left but cache.
  void ReleaseAll();

  std::string history() const { return history_; }

 private:
  using Content = uint64_t;

  struct Modelled {
    std::vector<TokenId> tokens;  // committed and being appended
    Position ctx_len = 0;         // committed
    int q_len = 0;                // appended by the last step
    bool good = true;             // the last step wrote what it should
    bool started = false;
    int named = 0;  // blocks whose hashes the table was told
    uint64_t salt = 0;
  };

  void Open();
  void Step(bool many);
  void Fork();
  void Release();
  void Probe();

  std::vector<proto::Shard> RandomShards();
  std::vector<proto::BlockHash> HashesOf(const Modelled& sequence, int64_t first, int64_t end) const;
  Content ContentAt(const Modelled& sequence, Position position) const;
  // What lies in one slot: of this token, this attention op and this KV head.
  static Content SlotContent(Content token, int group, int op, int head) {
    return token * 1000003u + static_cast<Content>(group * 10000 + op * 100 + head);
  }
  void Write(uint64_t id, Position begin, Position end, bool good);
  void CheckContent(uint64_t id);
  void CheckAccounts();
  uint64_t PickSequence();

  const proto::AttentionTable table_;
  SequenceTable sequences_;
  std::mt19937_64 random_;
  std::map<uint64_t, Modelled> modelled_;
  std::vector<std::vector<Content>> blocks_;  // [KvBlockId][slot]
  std::vector<uint64_t> pins_;
  uint64_t next_id_ = 1;
  std::string history_;
};

}  // namespace dovetail::attention::testing
