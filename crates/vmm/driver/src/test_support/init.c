/*
 * PID 1 of the guest that VMM drivers are tested with. Freestanding: system calls only, so that a C compiler is all
 * that its build needs.
 *
 * It loads the modules in /modules in the order of their names, prints "cpus N", "disk NAME BLOCKS" for each disk and
 * "ready", and then does what the word aenv.test=... on the kernel's command line says:
 *   count      prints "count 1", "count 2", ... ten times a second
 *   flood      prints lines without a pause
 *   write      writes "written by the guest" to the start of /dev/vda, syncs it, prints "written: ERRNO", counts
 *   poweroff   powers off
 *   reboot     reboots
 *   panic      exits, upon which the kernel panics
 */
typedef long word;

static word call(word n, word a, word b, word c, word d, word e)
{
	word r;
	register word r10 __asm__("r10") = d;
	register word r8 __asm__("r8") = e;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
	return r;
}

enum { READ = 0, WRITE = 1, OPEN = 2, CLOSE = 3, NANOSLEEP = 35, EXIT = 60, FSYNC = 74, MKDIR = 83, MOUNT = 165,
       REBOOT = 169, GETDENTS64 = 217, FINIT_MODULE = 313 };

static word length(const char *s) { word n = 0; while (s[n]) n++; return n; }
static void print(const char *s) { call(WRITE, 1, (word)s, length(s), 0, 0); }

static void print_number(unsigned long v)
{
	char digits[24];
	int i = sizeof digits;
	do digits[--i] = '0' + v % 10; while (v /= 10);
	call(WRITE, 1, (word)(digits + i), sizeof digits - i, 0, 0);
}

static const char *find(const char *text, const char *what)
{
	for (; *text; text++) {
		word i = 0;
		while (what[i] && text[i] == what[i]) i++;
		if (!what[i]) return text;
	}
	return 0;
}

static int less(const char *a, const char *b)
{
	while (*a && *a == *b) a++, b++;
	return *a < *b;
}

/* A file of /proc as text. */
static char *slurp(const char *path)
{
	static char text[1 << 16];
	word fd = call(OPEN, (word)path, 0, 0, 0, 0), n, have = 0;
	while (fd >= 0 && (n = call(READ, fd, (word)(text + have), sizeof text - 1 - have, 0, 0)) > 0) have += n;
	text[have] = 0;
	call(CLOSE, fd, 0, 0, 0, 0);
	return text;
}

static void load(const char *name)
{
	char path[300] = "/modules/";
	word i;
	for (i = 0; name[i]; i++) path[9 + i] = name[i];
	path[9 + i] = 0;
	word fd = call(OPEN, (word)path, 0, 0, 0, 0);
	word error = call(FINIT_MODULE, fd, (word)"", 0, 0, 0);
	call(CLOSE, fd, 0, 0, 0, 0);
	if (error && error != -17) { print("cannot load "); print(name); print("\n"); }
}

static void load_modules(void)
{
	static char entries[1 << 16];
	char last[260] = "";
	word fd = call(OPEN, (word)"/modules", 0200000, 0, 0, 0);
	word have = fd < 0 ? 0 : call(GETDENTS64, fd, (word)entries, sizeof entries, 0, 0);
	for (;;) {
		const char *next = 0;
		for (word at = 0; at < have; at += *(unsigned short *)(entries + at + 16)) {
			const char *name = entries + at + 19;
			if (find(name, ".ko") && less(last, name) && (!next || less(name, next))) next = name;
		}
		if (!next) return;
		load(next);
		word i = 0;
		do last[i] = next[i]; while (next[i++]);
	}
}

static void print_cpus(void)
{
	const char *at = slurp("/proc/cpuinfo");
	unsigned long cpus = 0;
	while ((at = find(at, "processor\t"))) cpus++, at++;
	print("cpus "); print_number(cpus); print("\n");
}

/* Lines of /proc/partitions: " MAJOR MINOR BLOCKS NAME". */
static void print_disks(void)
{
	char *at = slurp("/proc/partitions");
	while (*at) {
		char *fields[4] = { 0 }, *end;
		int n = 0;
		for (end = at; *end && *end != '\n'; end++)
			if (*end != ' ' && (end == at || end[-1] == ' ' || !end[-1]) && n < 4) fields[n++] = end;
			else if (*end == ' ' && end > at) *end = 0;
		char *next = *end ? end + 1 : end;
		*end = 0;
		if (n == 4 && find(fields[3], "vd")) {
			print("disk "); print(fields[3]); print(" "); print(fields[2]); print("\n");
		}
		at = next;
	}
}

static void count(void)
{
	struct { word seconds, nanoseconds; } pause = { 0, 100000000 };
	for (unsigned long n = 1;; n++) {
		print("count "); print_number(n); print("\n");
		call(NANOSLEEP, (word)&pause, 0, 0, 0, 0);
	}
}

static void write_disk(void)
{
	static char block[512] = "written by the guest";
	word fd = call(OPEN, (word)"/dev/vda", 2, 0, 0, 0), error = fd;
	if (fd >= 0) error = call(WRITE, fd, (word)block, sizeof block, 0, 0);
	if (error >= 0) error = call(FSYNC, fd, 0, 0, 0, 0);
	print("written: "); print_number(error < 0 ? -error : 0); print("\n");
	count();
}

static void power(word command) { call(REBOOT, 0xfee1dead, 672274793, command, 0, 0); }

void _start(void)
{
	call(MKDIR, (word)"/proc", 0755, 0, 0, 0);
	call(MKDIR, (word)"/dev", 0755, 0, 0, 0);
	call(MOUNT, (word)"proc", (word)"/proc", (word)"proc", 0, 0);
	call(MOUNT, (word)"dev", (word)"/dev", (word)"devtmpfs", 0, 0);
	load_modules();
	print_cpus();
	print_disks();
	print("ready\n");
	const char *todo = slurp("/proc/cmdline");
	if (find(todo, "aenv.test=flood")) for (;;) print("a line of a flood that nobody reads\n");
	if (find(todo, "aenv.test=write")) write_disk();
	if (find(todo, "aenv.test=poweroff")) power(0x4321fedc);
	if (find(todo, "aenv.test=reboot")) power(0x1234567);
	if (find(todo, "aenv.test=panic")) call(EXIT, 1, 0, 0, 0, 0);
	count();
}
