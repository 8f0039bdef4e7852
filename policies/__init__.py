"""Eviction and prefetch policies, installed as `kvtier.policies`: one small file each, importing only `kvtier.types`.

Found by name through the entry point group `kvtier.policies`, or in a config as `module:Class`.
"""
