# The disaggregated system in one process, behind Engine.
dovetail_library(embedded_cluster SRCS embedded_cluster.cc
  DEPS dovetail_attention_worker dovetail_compute_worker dovetail_scheduler dovetail_model dovetail_transport)
