"""Ready-made task families (data, workspaces, graders) and the small models to try them with.

Nothing else in `lightning_ray` imports from here; jobs, examples and configuration files name
what they use as `module:function`.
"""
