"""CUDA source to C++ for device.h: launches, shared memory, inline PTX. translate.py SOURCE TARGET."""
import os
import re
import sys

# PTX (without whitespace; @ is an operand or a number) and what it becomes; {n} is the n-th @.
D4, A4, B2 = '{@,@,@,@}', '{@,@,@,@}', '{@,@}'
MMA = 'emu::Mma(emu::%s, emu::Site::current(), {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9})'
WAIT = '{.reg.predp;mbarrier.%s.parity.shared.b64p,[@],@;selp.u32@,1,0,p;}'
TEST = '{2} = emu::BarrierTest({0}, {1}, emu::Site::current())'
BULK = 'cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes'
ASM = [
    ('mbarrier.init.shared.b64[@],@;', 'emu::BarrierInit({0}, {1})'),
    ('{.reg.b64t;mbarrier.arrive.shared.b64t,[@];}', 'emu::BarrierArrive({0})'),
    ('{.reg.b64t;mbarrier.arrive.shared.b64t,[@],@;}', 'emu::BarrierArrive({0}, {1})'),
    ('mbarrier.arrive.shared.b64_,[@];', 'emu::BarrierArrive({0})'),
    ('mbarrier.arrive.shared.b64_,[@],@;', 'emu::BarrierArrive({0}, {1})'),
    ('{.reg.b64t;mbarrier.arrive.expect_tx.shared.b64t,[@],@;}', 'emu::BarrierExpect({0}, {1}, true)'),
    ('mbarrier.arrive.expect_tx.shared.b64_,[@],@;', 'emu::BarrierExpect({0}, {1}, true)'),
    ('mbarrier.expect_tx.relaxed.shared.b64[@],@;', 'emu::BarrierExpect({0}, {1}, false)'),
    (WAIT % 'try_wait', TEST), (WAIT % 'test_wait', TEST),
    ('{.reg.b64policy;createpolicy.fractional.L2::evict_first.b64policy,1.0;' + BULK +
     '.L2::cache_hint[@],[@],@,[@],policy;}', 'emu::BulkCopy({0}, {1}, {2}, {3})'),
    (BULK + '[@],[@],@,[@];', 'emu::BulkCopy({0}, {1}, {2}, {3})'),
    ('cp.async.cg.shared.global[@],[@],@;', 'emu::CopyAsync({0}, {1}, {2}, {2})'),
    ('cp.async.cg.shared.global[@],[@],@,@;', 'emu::CopyAsync({0}, {1}, {2}, {3})'),
    ('cp.async.ca.shared.global[@],[@],@;', 'emu::CopyAsync({0}, {1}, {2}, {2})'),
    ('cp.async.ca.shared.global[@],[@],@,@;', 'emu::CopyAsync({0}, {1}, {2}, {3})'),
    ('cp.async.mbarrier.arrive.noinc.shared.b64[@];', 'emu::CopiesArrive({0})'),
    ('cp.async.commit_group;', 'emu::CommitCopies()'),
    ('cp.async.wait_group@;', 'emu::WaitForCopies({0})'),
    ('cp.async.wait_all;', 'emu::WaitForCopies(-1)'),
    ('bar.sync@;', 'emu::Bar({0}, 0, true, 1, emu::Site::current())'),
    ('bar.sync@,@;', 'emu::Bar({0}, {1}, true, 1, emu::Site::current())'),
    ('bar.arrive@,@;', 'emu::Bar({0}, {1}, false, 1, emu::Site::current())'),
    ('ldmatrix.sync.aligned.m8n8.x4.shared.b16{@,@,@,@},[@];',
     'emu::LoadMatrices({4}, false, emu::Site::current(), {0}, {1}, {2}, {3})'),
    ('ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16{@,@,@,@},[@];',
     'emu::LoadMatrices({4}, true, emu::Site::current(), {0}, {1}, {2}, {3})'),
    (f'mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32{D4},{A4},{B2},{D4};', MMA % 'kMmaBF16'),
    (f'mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32{D4},{A4},{B2},{D4};', MMA % 'kMmaF16'),
    (f'mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32{D4},{A4},{B2},{D4};', MMA % 'kMmaTF32'),
    ('ex2.approx.ftz.f32@,@;', '{0} = emu::Exp2({1})'),
    ('cvt.rna.tf32.f32@,@;', '{0} = emu::ToTF32({1})'),
    ('{.reg.b16t,u;mov.b32{t,u},@;cvt.rn.f16x2.e4m3x2@,t;}', '{1} = emu::WidenE4M3({0})'),
    ('{.reg.b16t,u;mov.b32{t,u},@;cvt.rn.f16x2.e4m3x2@,u;}', '{1} = emu::WidenE4M3(({0}) >> 16)'),
    ('ld.shared.v4.u32{@,@,@,@},[@];', 'emu::Load(emu::SharedAt({4}, 16, 16), {0}, {1}, {2}, {3})'),
    ('ld.shared.v2.u32{@,@},[@];', 'emu::Load(emu::SharedAt({2}, 8, 8), {0}, {1})'),
    ('st.shared.v4.u32[@],{@,@,@,@};', 'emu::Store(emu::SharedAt({0}, 16, 16), {1}, {2}, {3}, {4})'),
    ('ld.global.u32@,[@];', 'emu::Load({1}, {0})'),
    ('ld.global.nc.L1::no_allocate.v4.u32{@,@,@,@},[@];', 'emu::Load({4}, {0}, {1}, {2}, {3})'),
    ('ld.volatile.global.v2.u64{@,@},[@];', 'emu::Load({2}, {0}, {1})'),
    ('st.release.sys.global.u64[@],@;', 'emu::Store({0}, {1})'),
    ('mov.u64@,%%globaltimer;', '{0} = emu::Nanoseconds()'),
    ('fma.rn.bf16x2@,@,@,@;', '{0} = emu::ByHalves<__nv_bfloat16>({1}, {2}, {3}, emu::Fma)'),
    ('mul.rn.bf16x2@,@,@;', '{0} = emu::ByHalves<__nv_bfloat16>({1}, {2}, 0, emu::Multiply)'),
    ('sub.rn.bf16x2@,@,@;', '{0} = emu::ByHalves<__nv_bfloat16>({1}, {2}, 0, emu::Subtract)'),
    ('sub.rn.f16x2@,@,@;', '{0} = emu::ByHalves<__half>({1}, {2}, 0, emu::Subtract)'),
]
# No effect here, or of no use to the kernels that run here.
NOTHING = re.compile(r'(fence\.|prefetch|griddepcontrol\.|setmaxnreg\.)[^;]*;$')
UNUSED = re.compile(r'(\{\.reg\.predp;setp\.eq\.b32p,0,0;wgmma.*|wgmma.*|mul\.f16x2@,@,@;)$')


def pattern(text):
    return re.compile(re.escape(text).replace('@', r'(%?\d+)') + '$')


PATTERNS = [(pattern(ptx), call) for ptx, call in ASM]


def closing(text, at):
    """The place behind the bracket that closes the one at `at`; strings are skipped."""
    depth = 0
    while True:
        c = text[at]
        if c == '"':
            at = text.index('"', at + 1) if '\\"' not in text[at:text.index('"', at + 1) + 1] else sys.exit('string')
        depth += (c in '([{') - (c in ')]}')
        at += 1
        if depth == 0:
            return at


def operands(text):
    """The expressions of '"r"(a), "+f"(b[0]) : ...', in order, without the clobbers."""
    out, at = [], 0
    while (found := re.compile(r'"[^"]*"\s*\(').search(text, at)):
        end = closing(text, found.end() - 1)
        out.append('(' + text[found.end():end - 1].strip() + ')')
        at = end
    return out


def instruction(body):
    strings = re.match(r'(\s*"(?:[^"\\]|\\.)*")*', body)
    ptx = ''.join(re.findall(r'"((?:[^"\\]|\\.)*)"', strings.group()))
    ptx = re.sub(r'\\n|\\t|\s', '', ptx).replace('.shared::cta', '.shared').replace('.release.cta', '')
    args = operands(body[strings.end():])
    if NOTHING.match(ptx):
        return '(void)0'
    if UNUSED.match(re.sub(r'%\d+', '@', ptx)):
        return f'emu::Unsupported("{ptx}")'
    for known, call in PATTERNS:
        if (match := known.match(ptx)):
            values = [args[int(g[1:])] if g[0] == '%' else g for g in match.groups()]
            return call.format(*values)
    return '_Pragma("GCC error \\"emu: unknown asm: %s\\"")' % re.sub(r'[\\"]', '?', ptx)


def replaced(text, found, end, by):
    lines = '\n' * (text.count('\n', found, end) - by.count('\n'))
    return text[:found] + by + lines + text[end:], found + len(by)


def shared(found):
    """Declarations of shared memory."""
    kind, out = found.group(1), ''
    for name, sizes in re.findall(r'(\w+)((?:\[[^\]]*\])*)', found.group(2)):
        out += (f'using emu_{name}_type = {kind} {sizes}; static emu::Slot emu_{name}; auto& {name} = '
                f'*reinterpret_cast<emu_{name}_type*>(emu::StaticShared(emu_{name}, sizeof(emu_{name}_type), '
                f'alignof(emu_{name}_type)));')
    return out


def convert(text, name):
    at = 0
    while (found := re.compile(r'\basm\s*(?:volatile)?\s*\(').search(text, at)):
        end = closing(text, found.end() - 1)
        text, at = replaced(text, found.start(), end, instruction(text[found.end():end - 1]))
    text = re.sub(r'extern\s+__shared__\s+(?:__align__\(\d+\)|alignas\(\d+\))?\s*([\w: ]+?)\s+(\w+)\[\];',
                  r'auto* const \2 = reinterpret_cast<\1*>(emu::DynamicShared());', text)
    text = re.sub(r'__shared__\s+([^;()=,]+?)\s+(\w+(?:\[[^\]]*\])*(?:,\s*\w+(?:\[[^\]]*\])*)*);', shared, text)
    while (at := text.find('<<<')) >= 0:
        begin = max(text.rfind(c, 0, at) for c in ';{}') + 1
        begin += len(text[begin:at]) - len(text[begin:at].lstrip())
        middle = text.index('>>>', at)
        opening = text.index('(', middle)
        end = closing(text, opening)
        kernel, config = text[begin:at], text[at + 3:middle]
        call = f'emu::LaunchKernel("{name}", {kernel}, {config}, {text[opening + 1:end - 1]})'
        text, _ = replaced(text, begin, end, call)
    if '__shared__' in text:
        text = '#error emu: a declaration of shared memory that is not understood\n' + text
    return text


def main(source, target):
    name = source.rsplit('kernels/cuda/', 1)[-1]
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(source) as file:
        text = convert(file.read(), name)
    with open(target, 'w') as file:
        file.write(f'#line 1 "kernels/cuda/{name}"\n{text}')


main(*sys.argv[1:])
