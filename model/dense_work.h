#pragma once
#include "model/config.h"

namespace dovetail::model {

// Floating-point operations of a prompt's token in all projections and MLPs: a multiplication and an addition for each
// weight that it meets, of experts only those that it chooses. Neither the embedding nor the head, which prompts need
// for the last token only.
// Threads: pure.
double DenseFlopsPerToken(const ModelConfig& config);

}  // namespace dovetail::model
