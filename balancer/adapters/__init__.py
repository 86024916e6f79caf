"""Batches and checks for other people's trainers; `import balancer` needs none of their packages.

hf           transformers' Trainer: `BalancedTrainerMixin`; hf_checks, hf_loss, hf_resume are parts of it
accelerate   what happens to a loader that an Accelerator has prepared
hf_segment   one sample, loaded or tokenised, in transformers' spelling
hf_batch     the samples of a micro-batch flattened to one row: `HfCollate`
dummy_vision the vision tower in every forward: `run_dummy_vision`
packable     whether a model keeps the samples of such a row apart: `check_packable`
megatron     the same boundaries in Megatron's names: `packed_seq_params`
"""
