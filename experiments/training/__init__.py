"""How it is learned and reported: trainer, learners, plots, findings."""
