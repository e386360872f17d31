"""Batches that can be entered, stretched and split between the stages of a model (DVABatch)."""
