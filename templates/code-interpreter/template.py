"""Builds the code interpreter's template with E2B's own builder.

    E2B_API_KEY=… E2B_API_URL=… python template.py --image IMAGE [--packages FOLDER] [--name NAME]

IMAGE is Debian's or one made from it, with Python 3.11 and curl. FOLDER, below this one, holds what `requirements.txt` names,
as `pip install --target` leaves it; without it the guest asks PyPI.
"""

import argparse
import pathlib

from e2b import Template, default_build_logger, wait_for_url

HERE = pathlib.Path(__file__).resolve().parent
HOME = "/opt/code-interpreter"
# Where Debian's Python looks for what the machine's owner has installed.
PACKAGES = "/usr/local/lib/python3.11/dist-packages"
# Started again when it ends, as a service would be.
START = f"while :; do python3 {HOME}/server/main.py; sleep 1; done"


def definition(image: str, packages: str | None):
    template = Template(file_context_path=str(HERE)).from_image(image).set_user("root")
    if packages:
        template = template.copy(packages, PACKAGES, gzip=False)
    else:
        template = template.apt_install(["python3-pip"]).copy("requirements.txt", f"{HOME}/requirements.txt")
        template = template.run_cmd(f"pip install --break-system-packages --no-cache-dir -r {HOME}/requirements.txt")
    for part in ("server", "kernels", "jupyter"):
        template = template.copy(part, f"{HOME}/{part}")
    return (
        template.set_envs({"JUPYTER_PATH": f"{HOME}/jupyter", "MPLCONFIGDIR": "/home/user/.config/matplotlib"})
        .set_user("user")
        .set_workdir("/home/user")
        .set_start_cmd(START, wait_for_url("http://localhost:49999/health"))
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", default="python:3.11-bookworm")
    parser.add_argument("--packages", help="folder with the Python packages, relative to this file")
    parser.add_argument("--name", default="code-interpreter-v1", help="the default is what the SDKs ask for")
    options = parser.parse_args()
    built = Template.build(
        definition(options.image, options.packages),
        options.name,
        cpu_count=2,
        memory_mb=2048,
        on_build_logs=default_build_logger(),
    )
    print(built.template_id)


if __name__ == "__main__":
    main()
