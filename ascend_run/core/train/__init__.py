"""The training loop: process groups, gradient reduction, optimizer, schedule, evaluation."""
