"""Repositories: folders of models, each in versions.

REPO/echo/carpool.toml      what is declared of the model; optional if what it has is clear
REPO/echo/1/model.py        a version, and its files
REPO/echo/2/model.py
REPO/add/config.pbtxt       in place of carpool.toml: an entry in Triton's form
REPO/add/1/model.onnx

repository          a repository: names, versions, and what a worker serves for one
declared_replicas   how many model processes entries declare, for nodes
layout              which folders are entries and versions, and that files are inside of them
own                 an entry of Carpool's own form
of_triton           an entry of Triton's form
"""
