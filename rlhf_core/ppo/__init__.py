"""PPO-max: rollouts, rewards, advantages, losses and the loop around them (algorithms.md §3 to 8).

The mathematics is on four pages. Each trick of the paper (Zheng et al. 2023, "Secrets of RLHF in Large Language Models
Part I: PPO") and of its successors is a function:

==============================  ============================================  ==============  ==========================
trick                           function                                      source          switch below ``ppo``
==============================  ============================================  ==============  ==========================
reward normalisation and clip   ``rewards.normalize_and_clip_rewards``        paper, 5.3.1    ``reward.transform, clip``
reward scaling                  ``rewards.scale_rewards``                     paper, 5.3.1    ``reward.transform``
missing end, length             ``rewards.apply_penalties``                   algorithms §4   ``reward.*_penalty``
token-level KL penalty          ``rewards.token_rewards``                     paper, 5.3.2    ``kl.placement: reward``
KL estimators, KL in the loss   ``kl.kl_estimate``                            algorithms §4   ``kl.estimator``
adaptive KL coefficient         ``kl.KlController``                           Ziegler 2019    ``kl.controller``
generalised advantages          ``advantages.gae``                            Schulman 2016   ``advantage.gamma, lam``
leave-one-out (RLOO)            ``advantages.leave_one_out_advantages``       Ahmadian 2024   ``advantage.estimator``
group-relative (GRPO)           ``advantages.group_relative_advantages``      Shao 2024       ``advantage.estimator``
advantage normalisation, clip   ``advantages.normalize_and_clip_advantages``  paper, 5.3.1    ``advantage.normalize``
clipped surrogate, dual clip    ``losses.clipped_surrogate``                  Schulman 2017   ``surrogate.clip``
clip-higher (DAPO)              ``losses.clipped_surrogate``                  Yu 2025         ``surrogate.clip_high``
ratio of sequences (GSPO)       ``losses.sequence_ratios``                    Zheng 2025      ``surrogate.ratio``
PPO-penalty                     ``losses.penalty_surrogate``                  paper, eq. 11   ``surrogate.kind``
ratio to the fixed reference    ``losses.with_fixed_reference``               paper, 5.3.2    ``surrogate.fixed_refer…``
sampler correction (TIS)        ``losses.truncated_weights``                  Yao 2025        ``importance_sampling_…``
ratio to the sampler            ``rollout.predict_tokens``                    algorithms §6   ``importance_sampling_…``
entropy bonus or target         ``losses.entropy_sign``                       paper, 5.3.2    ``entropy.kind``
value clip                      ``losses.value_loss``                         algorithms §6   ``value_clip``
PPO-ptx                         ``losses.ptx_loss_sum``                       Ouyang 2022     ``ptx.weight``
global gradient clip            ``losses.clip_and_step``                      algorithms §6   ``gradient_norm``
critic pre-training             ``critic_pretraining.CriticTrainer``          paper, 5.3.3    section ``critic``
==============================  ============================================  ==============  ==========================

``trainer`` reads top to bottom as an iteration does; ``update`` makes the optimiser steps of one rollout.
"""
