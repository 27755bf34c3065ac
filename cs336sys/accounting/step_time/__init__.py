"""The time of a training step on paper, from counted work and measured rates."""
