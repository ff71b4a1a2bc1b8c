"""The fastest published BERT pretraining's recipe, scaled to the machine: `python -m experiments.bert_recipe`."""
