"""The first hour on a GPU: every test and benchmark that needs one, stage by stage."""
