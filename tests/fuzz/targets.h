#pragma once
#include <cstddef>
#include <cstdint>

// One function per untrusted format: feeds `size` bytes at `data` to its reader and, where the reader accepts them,
// looks at everything that it gave out. Each must return for every input, without a crash, hang or unbounded memory.
// libFuzzer drives them (fuzz_main.cc), and so does the corpus replay of every build (corpus_replay_test.cc).

namespace dovetail::fuzz {

void FuzzAnswer(const uint8_t* data, size_t size);
void FuzzApiRequest(const uint8_t* data, size_t size);
void FuzzAttentionWorker(const uint8_t* data, size_t size);
void FuzzChatTemplate(const uint8_t* data, size_t size);
void FuzzControl(const uint8_t* data, size_t size);
void FuzzFrame(const uint8_t* data, size_t size);
void FuzzGbnf(const uint8_t* data, size_t size);
void FuzzLark(const uint8_t* data, size_t size);
void FuzzGguf(const uint8_t* data, size_t size);
void FuzzHttpRequest(const uint8_t* data, size_t size);
void FuzzSafetensors(const uint8_t* data, size_t size);
void FuzzStepPlan(const uint8_t* data, size_t size);
void FuzzTokenize(const uint8_t* data, size_t size);
void FuzzTokenizerJson(const uint8_t* data, size_t size);
void FuzzWire(const uint8_t* data, size_t size);

}  // namespace dovetail::fuzz
