"""Old with new: files and workers of one release beside those of another.

`states`    what a release writes, and the service of its workers; runs with the package of that release
`checks`    what this checkout makes of files that a release has written
`peer`      a worker that serves, or one that calls it; runs with the package of either release
`builds`    packages of releases, and of commits, in folders of their own

``data/<release>`` has what each release wrote. They are states and not wheels: a wheel weighs two megabytes, states weigh 0.1. What a wheel would
show besides, two workers at work together, `make matrix` shows with a package that it builds from a commit. Before a release::

    python -m tests.releases.states
"""
