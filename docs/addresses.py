"""The project's addresses. While one is empty, no page prints a link, a badge or a picture that needs it."""

REPOSITORY = ""  # of the repository, such as https://github.com/owner/gpu_vecenv
SITE = ""  # of the documentation, with a slash at its end; link previews need it
