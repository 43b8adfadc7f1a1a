"""The training loop: process groups, gradients, optimizer, schedule, steps, evaluation."""
