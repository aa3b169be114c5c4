# NAME
if ! user_line "$1" > /dev/null; then
  if command -v useradd > /dev/null; then
    useradd -m -s /bin/bash -- "$1"
  else
    adduser -D -s /bin/bash "$1"
  fi
fi
