# ARCHIVE SOURCE LITERAL TARGET OWNER MODE WORKDIR USER
archive=$1 source=$2 literal=$3 owner=$(owner_of "$5") mode=$6
target=$(absolute "$4" "$7" "$8")
staging=$(mktemp -d /tmp/aenv-copy.XXXXXX)
trap 'rm -rf -- "$staging" "$archive"' EXIT
# Nobody's but root's while it is there: its files may be anything.
tar -C "$staging" -xof "$archive"

# A name may look like a pattern.
if [[ -e $staging/$literal || -L $staging/$literal ]]; then
  source=$literal
fi
entry=$staging/$source
if [[ -d $entry && ! -L $entry ]]; then
  chown -hR -- "$owner" "$entry"
  if [[ -n $mode ]]; then
    chmod -R -- "$mode" "$entry"
  fi
  make_dir "$target" "$owner"
  # Directories merge, also through links to directories; whatever else is in the way is replaced, links too.
  merge=()
  if [[ $(tar --version 2> /dev/null || true) == *GNU* ]]; then
    merge=(--keep-directory-symlink --no-overwrite-dir)
  fi
  tar -C "$entry" -cf - . | tar -C "$target" -xpf - "${merge[@]}"
elif [[ -e $entry || -L $entry ]]; then
  if [[ $target == */ || -d $target ]]; then
    target=${target%/}/$(basename -- "$source")
  fi
  if [[ -d $target && ! -L $target ]]; then
    printf "'%s' is a directory\n" "$target" >&2
    exit 1
  fi
  make_dir "$(dirname -- "$target")" "$owner"
  chown -h -- "$owner" "$entry"
  if [[ -n $mode && ! -L $entry ]]; then
    chmod -- "$mode" "$entry"
  fi
  rm -f -- "$target"
  mv -- "$entry" "$target"
else
  printf "'%s' is not among the files that were uploaded\n" "$source" >&2
  exit 1
fi
