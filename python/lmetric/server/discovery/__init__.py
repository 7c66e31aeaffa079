"""Service discovery: engines from the configuration, an administrator, files, DNS and Kubernetes.

A *source* reports all engines it knows, and reports them again after each change. `Members` merges
the reports into one fleet; `Discovery` runs the sources. To add a kind of source, write a class
with `follow`.
"""
