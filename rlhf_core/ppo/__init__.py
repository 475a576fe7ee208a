"""PPO-max: rollouts, rewards, advantages, losses and the loop around them (algorithms.md §3 to 8).

The mathematics is on four pages: ``rewards``, ``kl``, ``advantages`` and ``losses``. Each trick of
the paper (Zheng et al. 2023, "Secrets of RLHF in Large Language Models Part I: PPO") and of its
successors is a function:

============================= ============================= ============= ======================
trick                         function                      source        switch below ppo
============================= ============================= ============= ======================
``rewards``
reward normalisation and clip normalize_and_clip_rewards    paper, 5.3.1  reward.transform, clip
reward scaling                scale_rewards                 paper, 5.3.1  reward.transform
missing end, length           apply_penalties               algorithms §4 reward.*_penalty
token-level KL penalty        token_rewards                 paper, 5.3.2  kl.placement: reward
``kl``
KL estimators, KL in the loss kl_estimate                   algorithms §4 kl.estimator
adaptive KL coefficient       KlController                  Ziegler 2019  kl.controller
``advantages``
generalised advantages        gae                           Schulman 2016 advantage.gamma, lam
leave-one-out (RLOO)          leave_one_out_advantages      Ahmadian 2024 advantage.estimator
group-relative (GRPO)         group_relative_advantages     Shao 2024     advantage.estimator
advantage normalisation, clip normalize_and_clip_advantages paper, 5.3.1  advantage.normalize
``losses``
clipped surrogate, dual clip  clipped_surrogate             Schulman 2017 surrogate.clip
clip-higher (DAPO)            clipped_surrogate             Yu 2025       surrogate.clip_high
ratio of sequences (GSPO)     sequence_ratios               Zheng 2025    surrogate.ratio
PPO-penalty                   penalty_surrogate             paper, eq. 11 surrogate.kind
ratio to the fixed reference  with_fixed_reference          paper, 5.3.2  surrogate.fixed_refer…
sampler correction (TIS)      truncated_weights             Yao 2025      importance_sampling_…
entropy bonus or target       entropy_sign                  paper, 5.3.2  entropy.kind
value clip                    value_loss                    algorithms §6 value_clip
PPO-ptx                       ptx_loss_sum                  Ouyang 2022   ptx.weight
global gradient clip          clip_and_step                 algorithms §6 gradient_norm
``rollout``
ratio to the sampler          predict_tokens                algorithms §6 importance_sampling_…
``critic_pretraining``
critic pre-training           CriticTrainer                 paper, 5.3.3  section critic
============================= ============================= ============= ======================

``trainer`` reads top to bottom as an iteration does; ``update`` makes the optimiser steps of one
rollout.
"""
